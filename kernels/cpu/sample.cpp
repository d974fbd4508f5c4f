// Draws tokens: llmx/sampler.py defines which, kernels/reference/sample.py the numbers behind them, bit for bit.
// Rows are cut into pieces of a fixed size, so threads change nothing. Nothing is sorted: a row's largest logits per
// chunk bound what has to be looked at, and the smallest logit that stays is found by bisection.
#include "draw.h"
#include "ops.h"
#include "philox.h"
#include "runtime/pool.h"
#include "simd.h"

namespace LLMX_ISA {
namespace {

constexpr int CHUNK = 4 * WIDTH;  // tokens whose noise is made at once
constexpr int64_t PIECE = 128 * CHUNK;        // tokens that are worth a task of their own
constexpr float INFINITE = __builtin_inff(), LEAST_TEMPERATURE = 1e-5f;
constexpr float NO_WEIGHT = -25.0f;  // so far below the largest logit a weight rounds to zero
constexpr int MOST_TOP = 64;             // likeliest tokens that may be asked for
constexpr float MOST_NOISE = 16.64f, SLACK = 1e-3f;

struct Rule {  // of a sequence; sample.py packs it
  int64_t seed, until;  // no stops before this position
  const int32_t *said, *bias, *stops;  // tokens; those of the prompt come first
  const float* biases;
  int32_t prompt, count, bias_count, stop_count, top_k, logprobs;
  float temperature, top_p, floor, repetition, presence, frequency;
};
static_assert(sizeof(Rule) == 96, "sample.py packs it so");

struct Best {
  float score;
  int64_t token;
};

struct Row {
  const Rule* rule;
  const float* x;
  const uint8_t* mask;
  float* changed;  // where x is to lie when single tokens change; or null
  float divisor, edge, bound;
  bool samples, settled;
  float* peaks;  // the largest of each chunk; NaN if one is
  Best* pieces;
};

struct Job {
  const float* logits;
  int64_t stride, rows, vocab, chunks, pieces;
  const int64_t *positions, *path;
  int64_t width;
  Row* row;
  int64_t* tokens;
  float *own, *values;
  int64_t* top;
  int64_t most;
};

LLMX_INLINE int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }

// The largest of [begin, end), the first of equal ones; the first that is no number, if there is one.
Best largest(const float* x, int64_t begin, int64_t end) {
  Best best{x[begin], begin};
  for (int64_t at = begin; at < end && best.score == best.score; at += CHUNK) {
    const int64_t stop = least_of(at + CHUNK, end);
    if (stop - at == CHUNK) {
      const F so_far = all(best.score), a = load(x + at), b = load(x + at + 16), c = load(x + at + 32);
      const F d = load(x + at + 48);
      if (!(any_over(a, so_far) | any_over(b, so_far) | any_over(c, so_far) | any_over(d, so_far))) continue;
    }
    for (int64_t i = at; i < stop; ++i)
      if (!(x[i] <= best.score)) {
        best = {x[i], i};
        if (best.score != best.score) break;
      }
  }
  return best;
}

// The logits of a chunk, divided by the temperature; what is missing at the end of the vocabulary is -infinity.
LLMX_INLINE const float* logits_of(const Job& job, const Row& row, int64_t chunk, float* room) {
  const int64_t at = chunk * CHUNK, count = least_of(CHUNK, job.vocab - at);
  if (count == CHUNK && row.divisor == 1.0f) return row.x + at;
  for (int i = 0; i < CHUNK; ++i) room[i] = -INFINITE;
  __builtin_memcpy(room, row.x + at, static_cast<uint64_t>(count) * sizeof(float));
  if (row.divisor != 1.0f)
    for (int i = 0; i < CHUNK; i += LANES) store(room + i, div(load(room + i), all(row.divisor)));
  return room;
}

LLMX_INLINE float peak_of(const float* x) {
  F most_so_far = load(x);
  bool none = any_over(most_so_far, most_so_far);
  for (int i = LANES; i < CHUNK; i += LANES) {
    const F v = load(x + i);
    none |= any_over(v, v);
    most_so_far = most(v, most_so_far);
  }
  return none ? __builtin_nanf("") : most_of(most_so_far);
}

double mass_of(const Job& job, const Row& row, float largest) {
  double sums[LANES] = {0};
  for (int64_t c = 0; c < job.chunks; ++c) {
    if (row.peaks[c] - largest < NO_WEIGHT) continue;
    float room[CHUNK];
    const float* x = logits_of(job, row, c, room);
    for (int i = 0; i < CHUNK; i += LANES) {
      double each[LANES];
      weigh(load(x + i), largest, each);
      for (int j = 0; j < LANES; ++j) sums[j] += each[j];
    }
  }
  double sum = 0;
  for (int i = 0; i < LANES; ++i) sum += sums[i];
  return sum;
}

double sum_of(const double* w, int64_t count) {  // whole numbers: in any order
  double sums[4] = {0};
  int64_t i = 0;
  for (; i + 4 <= count; i += 4)
    for (int j = 0; j < 4; ++j) sums[j] += w[i + j];
  for (; i < count; ++i) sums[0] += w[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

void range_of(const float* x, int64_t count, float& low, float& high) {
  low = high = x[0];
  int64_t i = 0;
  if (count >= LANES) {
    F lows = load(x), highs = lows;
    for (i = LANES; i + LANES <= count; i += LANES) lows = least(load(x + i), lows), highs = most(load(x + i), highs);
    low = -most_of(sub(zero(), lows)), high = most_of(highs);
  }
  for (; i < count; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
  }
}

// Moves what is above the pivot to the front, with its weights; how many those are, and in `sum` what they weigh.
int64_t part(float* x, double* w, int64_t count, float pivot, double& sum) {
  int64_t larger = 0;
  sum = 0;
  if (w == nullptr) {
    for (int64_t i = 0; i < count; ++i) {
      const float v = x[i];
      x[i] = x[larger], x[larger] = v;
      larger += v > pivot;
    }
    sum = static_cast<double>(larger);
    return larger;
  }
  for (int64_t i = 0; i < count; ++i) {
    const float v = x[i];
    const double weight = w[i];
    x[i] = x[larger], x[larger] = v;
    w[i] = w[larger], w[larger] = weight;
    larger += v > pivot;
  }
  sum = sum_of(w, larger);
  return larger;
}

// The smallest of x whose larger ones weigh less than `target` together; without `w` each weighs 1. Reorders x and w.
// Each round halves the range of values or of their bits, and drops one side.
float edge_of(float* x, double* w, int64_t count, double target) {
  double above = 0;
  for (int round = 0;; ++round) {
    float low, high;
    range_of(x, count, low, high);
    if (low == high) return low;
    float pivot = low * 0.5f + high * 0.5f;
    if (round % 2) {
      const int64_t from = order_of(low);
      pivot = with_order(from + (order_of(high) - from) / 2);
    }
    if (!(pivot >= low && pivot < high)) pivot = low;
    double sum;
    const int64_t larger = part(x, w, count, pivot, sum);
    if (above + sum >= target) {
      count = larger;
    } else {
      above += sum;
      x += larger, count -= larger;
      if (w != nullptr) w += larger;
    }
  }
}

struct Scratch {
  float *x, *peaks;
  double* w;
};

Scratch scratch(const Job& job, int thread) {
  const int64_t room = job.chunks * CHUNK;
  double* w = static_cast<double*>(llmx_pool::scratch(thread, room * 12 + job.chunks * 4));
  float* x = reinterpret_cast<float*>(w + room);
  return {x, x + room, w};
}

// At least so many logits are no smaller than this.
float bound_of(const Job& job, const Row& row, int64_t count, const Scratch& s) {
  if (count > job.chunks) return -INFINITE;
  __builtin_memcpy(s.x, row.peaks, static_cast<uint64_t>(job.chunks) * sizeof(float));
  return edge_of(s.x, nullptr, job.chunks, static_cast<double>(count));
}

// Those that are not below `bound`, in the order of the tokens; no zero has a sign.
int64_t gather(const Job& job, const Row& row, float bound, float* to) {
  int64_t found = 0;
  for (int64_t c = 0; c < job.chunks; ++c) {
    if (row.peaks[c] < bound) continue;
    float room[CHUNK];
    const float* x = logits_of(job, row, c, room);
    const int count = static_cast<int>(least_of(CHUNK, job.vocab - c * CHUNK));
    for (int i = 0; i < count; ++i) {
      to[found] = x[i] + 0.0f;
      found += !(x[i] < bound);
    }
  }
  return found;
}

double weigh_all(const Scratch& s, int64_t count, float largest) {
  for (int64_t i = count; i % LANES; ++i) s.x[i] = -INFINITE;
  for (int64_t at = 0; at < count; at += LANES) weigh(load(s.x + at), largest, s.w + at);
  return sum_of(s.w, count);
}

LLMX_INLINE double at_least_one(double target) { return target > 0.5 ? target : 0.5; }  // token stays

// The smallest logit that top-k and top-p leave.
float truncated(const Job& job, const Row& row, float largest, const Scratch& s) {
  const Rule& rule = *row.rule;
  const double share = static_cast<double>(rule.top_p);
  float edge = -INFINITE;
  if (rule.top_k > 0 && rule.top_k < job.vocab) {
    const float bound = bound_of(job, row, rule.top_k, s);
    int64_t count = gather(job, row, bound, s.x);
    edge = edge_of(s.x, nullptr, count, static_cast<double>(rule.top_k));
    if (!(rule.top_p < 1.0f)) return edge;
    count = gather(job, row, edge, s.x);
    double mass = weigh_all(s, count, largest), last[LANES];
    weigh(all(edge), largest, last);
    mass -= static_cast<double>(count - rule.top_k) * last[0];  // of equal logits at the edge top-k counts some
    return edge_of(s.x, s.w, count, at_least_one(share * mass));
  }
  if (!(rule.top_p < 1.0f)) return edge;
  const double target = at_least_one(share * mass_of(job, row, largest));
  const float floor = largest + NO_WEIGHT;
  float bound = bound_of(job, row, least_of(32, job.chunks), s);
  for (int step = 0;; ++step) {  // first a few, then as many as it takes
    bound = bound > floor ? bound : floor;
    const int64_t count = gather(job, row, bound, s.x);
    if (weigh_all(s, count, largest) >= target || bound == floor) return edge_of(s.x, s.w, count, target);
    bound = step == 0 ? bound_of(job, row, least_of(512, job.chunks), s) : bound - static_cast<float>(1 << step);
  }
}

struct Noise {  // of some chunks, and what is no smaller than any of it
  Block block[LANES];
  float most[LANES];
  bool needed[LANES];
};

// Only where a sum could reach `bound`. The bounds of all chunks are made at once: one alone is a long chain.
void make_noise(const Job& job, const Row& row, int64_t begin, int64_t end, float bound, Noise& noise) {
  const uint64_t seed = static_cast<uint64_t>(row.rule->seed);
  const uint64_t position = static_cast<uint64_t>(job.positions[&row - job.row]);
  for (int64_t c = 0; c < LANES; ++c) {
    const float peak = begin + c < end ? row.peaks[begin + c] : -INFINITE;
    noise.most[c] = 0.5f;
    noise.needed[c] = begin + c < end && !(peak < row.edge || peak + MOST_NOISE < bound);
    if (!noise.needed[c]) continue;
    Block& block = noise.block[c];
    block = random_bits(seed, position, 0, (begin + c) * CHUNK);
    uint32_t highest[WIDTH] = {0}, high = 0;
    for (int j = 0; j < 4; ++j)
      for (int i = 0; i < WIDTH; ++i) highest[i] = block.word[j][i] > highest[i] ? block.word[j][i] : highest[i];
    for (int i = 0; i < WIDTH; ++i) high = highest[i] > high ? highest[i] : high;
    noise.most[c] = uniform(high);
  }
  gumbel(noise.most);
}

// The largest sum of logit and noise in some chunks. `bound`: the row has one that is no smaller.
Best loudest(const Job& job, const Row& row, int64_t begin, int64_t end, float bound) {
  Best best{-INFINITE, -1};
  Noise noise;
  for (int64_t c = begin; c < end; ++c) {
    const int64_t at = (c - begin) % LANES;
    if (at == 0) make_noise(job, row, c, end, bound, noise);
    if (!noise.needed[at] || row.peaks[c] + (noise.most[at] + SLACK) < bound) continue;
    float each[CHUNK], room[CHUNK];
    for (int i = 0; i < WIDTH; ++i)
      for (int j = 0; j < 4; ++j) each[4 * i + j] = uniform(noise.block[at].word[j][i]);
    for (int i = 0; i < CHUNK; i += LANES) gumbel(each + i);
    const float* x = logits_of(job, row, c, room);
    for (int i = 0; i < CHUNK; ++i) {
      const float score = x[i] + each[i];
      if (!(x[i] < row.edge) && score > best.score) best = {score, c * CHUNK + i};
    }
    bound = best.score > bound ? best.score : bound;
  }
  return best;
}

// What repetition, presence and frequency take from tokens that were said. `said`: of the sequence and of the drafts.
void penalise(const Job& job, const Row& row, const int64_t* drafts, int thread) {
  const Rule& rule = *row.rule;
  const uint64_t bytes = static_cast<uint64_t>(job.vocab) * sizeof(int32_t);
  int32_t* counts = static_cast<int32_t*>(llmx_pool::scratch(thread, static_cast<int64_t>(bytes)));
  __builtin_memset(counts, 0, bytes);
  const auto each = [&](const auto& use) __attribute__((always_inline)) {
    for (int64_t i = 0; i < rule.count; ++i)
      if (static_cast<uint32_t>(rule.said[i]) < job.vocab) use(rule.said[i], i >= rule.prompt);
    for (int64_t i = 0; i < job.width; ++i)
      if (static_cast<uint64_t>(drafts[i]) < static_cast<uint64_t>(job.vocab)) use(drafts[i], true);
  };
  each([&](int64_t token, bool output) __attribute__((always_inline)) { counts[token] += output; });
  each([&](int64_t token, bool) __attribute__((always_inline)) {
    if (counts[token] < 0) return;  // done
    float x = row.changed[token];
    x = x > 0.0f ? x / rule.repetition : x * rule.repetition;
    x = x - static_cast<float>(counts[token]) * rule.frequency;
    row.changed[token] = x - (counts[token] > 0 ? rule.presence : 0.0f);
    counts[token] = -1;
  });
}

// No stops before their position, unless the grammar allows nothing else.
void ban(const Job& job, const Row& row) {
  const Rule& rule = *row.rule;
  int64_t others = 1;
  if (row.mask != nullptr) {
    others = 0;
    for (int64_t v = 0; v < job.vocab; ++v) others += row.mask[v];
    for (int64_t i = 0; i < rule.stop_count; ++i)
      if (static_cast<uint32_t>(rule.stops[i]) < job.vocab) others -= row.mask[rule.stops[i]];
  }
  for (int64_t i = 0; others && i < rule.stop_count; ++i)
    if (static_cast<uint32_t>(rule.stops[i]) < job.vocab) row.changed[rule.stops[i]] = -INFINITE;
}

void change(void* context, int64_t r, int thread) {
  Job& job = *static_cast<Job*>(context);
  Row& row = job.row[r];
  if (row.changed == nullptr) return;
  const Rule& rule = *row.rule;
  __builtin_memcpy(row.changed, row.x, static_cast<uint64_t>(job.vocab) * sizeof(float));
  if (rule.said != nullptr) penalise(job, row, job.path + r * job.width, thread);
  for (int64_t i = 0; i < rule.bias_count; ++i)
    if (static_cast<uint32_t>(rule.bias[i]) < job.vocab) row.changed[rule.bias[i]] += rule.biases[i];
  if (job.positions[r] < rule.until) ban(job, row);
  if (row.mask != nullptr)
    for (int64_t v = 0; v < job.vocab; ++v) row.changed[v] = row.mask[v] ? row.changed[v] : -INFINITE;
  row.x = row.changed;
}

void look(void* context, int64_t task, int) {
  Job& job = *static_cast<Job*>(context);
  Row& row = job.row[task / job.pieces];
  const int64_t piece = task % job.pieces, begin = piece * PIECE, end = least_of(begin + PIECE, job.vocab);
  if (!row.samples) {
    row.pieces[piece] = largest(row.x, begin, end);
    return;
  }
  for (int64_t c = begin / CHUNK; c < (end + CHUNK - 1) / CHUNK; ++c) {
    float room[CHUNK];
    row.peaks[c] = peak_of(logits_of(job, row, c, room));
  }
}

// What a row that samples leaves, and a bound for its draw.
void prepare(void* context, int64_t r, int thread) {
  Job& job = *static_cast<Job*>(context);
  Row& row = job.row[r];
  if (!row.samples) return;
  const Best peak = largest(row.peaks, 0, job.chunks);
  if (!(peak.score > -INFINITE && peak.score < INFINITE)) {  // no draw: the first of what is largest
    row.settled = true;
    job.tokens[r] = largest(row.x, 0, job.vocab).token;
    return;
  }
  row.edge = truncated(job, row, peak.score, scratch(job, thread));
  const float floor = peak.score + row.rule->floor;
  if (floor > row.edge) row.edge = floor;
  row.bound = loudest(job, row, peak.token, peak.token + 1, -INFINITE).score;
}

void shout(void* context, int64_t task, int) {
  Job& job = *static_cast<Job*>(context);
  Row& row = job.row[task / job.pieces];
  if (!row.samples || row.settled) return;
  const int64_t piece = task % job.pieces, begin = piece * (PIECE / CHUNK);
  row.pieces[piece] = loudest(job, row, begin, least_of(begin + PIECE / CHUNK, job.chunks), row.bound);
}

void choose(Job& job, int64_t r) {
  const Row& row = job.row[r];
  if (row.settled) return;
  Best best = row.pieces[0];
  for (int64_t p = 1; p < job.pieces && best.score == best.score; ++p)
    if (!(row.pieces[p].score <= best.score)) best = row.pieces[p];
  job.tokens[r] = best.token;
}

// Log-probabilities of the raw logits: the drawn token's, and the likeliest with theirs.
void score(void* context, int64_t r, int thread) {
  Job& job = *static_cast<Job*>(context);
  job.own[r] = 0.0f;
  float* values = job.values + r * job.most;
  int64_t* top = job.top + r * job.most;
  for (int64_t i = 0; i < job.most; ++i) values[i] = 0.0f, top[i] = 0;
  if (job.row[r].rule->logprobs < 0) return;
  const Scratch s = scratch(job, thread);
  Row row{};
  row.x = job.logits + r * job.stride, row.divisor = 1.0f, row.peaks = s.peaks;
  float room[CHUNK];
  for (int64_t c = 0; c < job.chunks; ++c) row.peaks[c] = peak_of(logits_of(job, row, c, room));
  const float peak = largest(row.peaks, 0, job.chunks).score;
  const bool finite = peak > -INFINITE && peak < INFINITE;
  const float bound = finite ? bound_of(job, row, job.most, s) : -INFINITE;
  int64_t found = 0, orders[MOST_TOP];
  for (int64_t c = 0; c < job.chunks; ++c) {
    if (row.peaks[c] < bound) continue;
    for (int64_t v = c * CHUNK; v < least_of(c * CHUNK + CHUNK, job.vocab); ++v) {
      if (row.x[v] < bound) continue;
      const int64_t order = order_of(row.x[v]);
      if (found == job.most && order <= orders[found - 1]) continue;
      int64_t at = found < job.most ? found++ : found - 1;
      for (; at > 0 && orders[at - 1] < order; --at) orders[at] = orders[at - 1], top[at] = top[at - 1];
      orders[at] = order, top[at] = v;
    }
  }
  const double none = __builtin_nan(""), mass = finite ? mass_of(job, row, peak) * 0x1p-34 : none;
  const double norm = static_cast<double>(peak) + __builtin_log(mass);
  for (int64_t i = 0; i < found; ++i) values[i] = static_cast<float>(static_cast<double>(row.x[top[i]]) - norm);
  job.own[r] = static_cast<float>(static_cast<double>(row.x[job.tokens[r]]) - norm);
}

}  // namespace

void draw(int64_t* tokens, float* own, float* values, int64_t* top, int64_t most, const float* logits, int64_t stride,
          int64_t rows, int64_t vocab, const uint8_t* rules, const int64_t* index, const int64_t* positions,
          const int64_t* path, int64_t width, const int64_t* masked, int64_t masks, const uint8_t* mask,
          int32_t threads) {
  const int64_t chunks = (vocab + CHUNK - 1) / CHUNK, pieces = (vocab + PIECE - 1) / PIECE;
  const int64_t each = static_cast<int64_t>(sizeof(Row)) + pieces * static_cast<int64_t>(sizeof(Best)) + chunks * 4;
  uint8_t* space = static_cast<uint8_t*>(__builtin_calloc(static_cast<uint64_t>(rows), static_cast<uint64_t>(each)));
  Row* row = reinterpret_cast<Row*>(space);
  Best* bests = reinterpret_cast<Best*>(row + rows);
  float* peaks = reinterpret_cast<float*>(bests + rows * pieces);
  Job job{logits, stride, rows, vocab, chunks, pieces, positions, path, width, row, tokens, own, values, top, most};
  for (int64_t i = 0; i < masks; ++i) row[masked[i]].mask = mask + i * vocab;
  int64_t changes = 0, samples = 0, r = 0;
  const auto changed = [&](const Row& x) {
    const bool banned = x.rule->stop_count && positions[r] < x.rule->until;
    return x.mask != nullptr || x.rule->said != nullptr || x.rule->bias_count || banned;
  };
  for (r = 0; r < rows; ++r) {
    Row& x = row[r];
    x.rule = reinterpret_cast<const Rule*>(rules) + index[r];
    x.x = logits + r * stride, x.peaks = peaks + r * chunks, x.pieces = bests + r * pieces, x.edge = -INFINITE;
    x.samples = x.rule->temperature >= LEAST_TEMPERATURE;
    x.divisor = x.samples ? x.rule->temperature : 1.0f;
    samples += x.samples, changes += changed(x);
  }
  float* room = static_cast<float*>(__builtin_malloc(static_cast<uint64_t>(changes * vocab) * sizeof(float)));
  if (changes) {
    float* next = room;
    for (r = 0; r < rows; ++r)
      if (changed(row[r])) row[r].changed = next, next += vocab;
    llmx_pool::each(change, &job, rows, threads);
  }
  llmx_pool::each(look, &job, rows * pieces, threads);
  if (samples) {
    llmx_pool::each(prepare, &job, rows, threads);
    llmx_pool::each(shout, &job, rows * pieces, threads);
  }
  for (r = 0; r < rows; ++r) choose(job, r);
  if (most) llmx_pool::each(score, &job, rows, threads);
  __builtin_free(room);
  __builtin_free(space);
}

}  // namespace LLMX_ISA
