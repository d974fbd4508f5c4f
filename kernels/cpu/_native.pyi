def philox_uniform(out: int, seeds: int, positions: int, rows: int, vocab: int, stream: int, /) -> None: ...
def linear_packed(
    out: int,
    stride: int,
    x: int,
    rows: int,
    inputs: int,
    packed: int,
    block_bytes: int,
    outputs: int,
    format: int,
    bias: int,
    threads: int,
    /,
) -> None: ...
def linear_int8(
    out: int,
    stride: int,
    x: int,
    rounded: int,
    rows: int,
    inputs: int,
    packed: int,
    block_bytes: int,
    outputs: int,
    format: int,
    bias: int,
    powers: int,
    threads: int,
    /,
) -> None: ...
def unpack_linear(out: int, packed: int, block_bytes: int, inputs: int, outputs: int, format: int, /) -> None: ...
def pack_blocks(
    packed: int,
    block_bytes: int,
    rows: int,
    row_bytes: int,
    outputs: int,
    inputs: int,
    kind: int,
    layout: int,
    threads: int,
    /,
) -> None: ...
def quantize_blocks(
    out: int, rows: int, importance: int, count: int, inputs: int, kind: int, threads: int, /
) -> None: ...
def attention(
    out: int,
    q: int,
    keys: int,
    values: int,
    scales: int,
    heads: int,
    kv_heads: int,
    dim: int,
    block_bytes: int,
    head_bytes: int,
    kind: int,
    units: int,
    count: int,
    prefix: int,
    table: int,
    width: int,
    size: int,
    base: int,
    paths: int,
    depth: int,
    sinks: int,
    scale: float,
    cap: float,
    window: int,
    first: int,
    threads: int,
    /,
) -> None: ...
def rms_norm(
    out: int,
    total: int,
    x: int,
    residual: int,
    weight: int,
    rows: int,
    hidden: int,
    eps: float,
    threads: int,
    /,
) -> None: ...
def rope_and_write(
    q: int,
    qkv: int,
    rows: int,
    keys: int,
    values: int,
    scales: int,
    heads: int,
    kv_heads: int,
    dim: int,
    half: int,
    size: int,
    block_bytes: int,
    head_bytes: int,
    kind: int,
    slot: int,
    cos: int,
    sin: int,
    threads: int,
    /,
) -> None: ...
def draw(
    tokens: int,
    own: int,
    values: int,
    top: int,
    most: int,
    logits: int,
    stride: int,
    rows: int,
    vocab: int,
    rules: int,
    index: int,
    positions: int,
    path: int,
    width: int,
    masked: int,
    masks: int,
    mask: int,
    threads: int,
    /,
) -> None: ...
def round_groups(
    errors: int,
    weight: int,
    columns: int,
    rows: int,
    inputs: int,
    group: int,
    factor: float,
    top: int,
    symmetric: int,
    dtype: int,
    threads: int,
    /,
) -> None: ...
def search_groups(
    scales: int,
    zeros: int,
    weight: int,
    metric: int,
    quadratic: int,
    rows: int,
    inputs: int,
    group: int,
    factors: int,
    count: int,
    top: int,
    symmetric: int,
    dtype: int,
    threads: int,
    /,
) -> None: ...
def gptq_sweep(
    left: int,
    codes: int,
    errors: int,
    factor: int,
    stride: int,
    count: int,
    outputs: int,
    scales: int,
    zeros: int,
    groups: int,
    top: int,
    threads: int,
    /,
) -> None: ...
def gated(out: int, x: int, rows: int, inner: int, kind: int, threads: int, /) -> None: ...
def norm_heads(
    out: int,
    x: int,
    rows: int,
    width: int,
    q_width: int,
    k_width: int,
    q_weight: int,
    q_unit: int,
    k_weight: int,
    k_unit: int,
    eps: float,
    threads: int,
    /,
) -> None: ...
def add_scaled(out: int, x: int, scale: float, y: int, count: int, threads: int, /) -> None: ...
def copy_rows(
    out: int,
    out_stride: int,
    x: int,
    stride: int,
    bytes: int,
    index: int,
    count: int,
    rows: int,
    threads: int,
    /,
) -> None: ...
def widen(out: int, x: int, count: int, kind: int, threads: int, /) -> None: ...
def narrow(out: int, x: int, count: int, threads: int, /) -> None: ...
def look_up(
    out: int,
    stored: int,
    row_bytes: int,
    count: int,
    ids: int,
    rows: int,
    hidden: int,
    kind: int,
    threads: int,
    /,
) -> None: ...

class Recording:
    def replay(self) -> None: ...
    def replay_rows(self, now: int, recorded: int, units: int, /) -> None: ...
    def follows(self, recorded: int, /) -> bool: ...
    def __len__(self) -> int: ...

def begin(dry: bool = False) -> None: ...
def end() -> Recording: ...
def inside() -> int: ...
def isas() -> list[str]: ...
def use(isa: str, /) -> None: ...
def active() -> str: ...
