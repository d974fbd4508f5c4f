"""The tables of GGUF's IQ types: grids of points that stand for several weights at once, signs, uneven levels.

The points were chosen by how often they occur in models, so no rule gives them: they are data of the format (ggml's
ggml-common.h). Here a point is the number that its coordinates' levels make, first lowest; a grid is sorted by it.
"""

from __future__ import annotations

import base64
import functools
import zlib

import torch
from torch import Tensor

from llmx.schemes.blocks import numbers

# Per grid: coordinates of a point, bits of one, what each of its levels is worth, and the points: zlib's compression
# of the differences between neighbours, 7 bits a byte, lowest first, the eighth set where more follow.
GRIDS = {
    "IQ2_XXS": (
        8,
        2,
        (8, 25, 43),
        "c-muNVrFJyXXasIV-jcP;oxMJVd9X8XXatmb`i;7Qb_pE#LOcI6l9Z7Wabfx0n%#9;(`_I1}+MBm{@^Al0dy?H8zJBh2C-lmC7rq@UUicNEm"
        "RbEn!sL&CDUes$xEa(Q6)~*lT8H9s|dE*4d038P{_&aahU9Gc9M7-@(ZAA0#8TiqTPd4bu-MiINS>d$l2s;o#!}+FPLDD9>8MZ^0)t1887^W"
        "Tns@#zq#P9@gEA5uA#L8NEMnad2|5Cveo*CB0?*&&*WuoiTU~vml4}9mW%kf4F%JG-fb{9%l4dz|7js#8kA8b)P;Hhq+@Dqlm^u#t+OO|0*n"
        "Cbn`1US6IZ{#MI05nVUyMCb2Z@DC2HsC8b`b4Q%rnAMyH`wlIEYoWZh#V+$hyYn(-h",
    ),
    "IQ2_XS": (
        8,
        2,
        (8, 25, 43),
        "c-mc%F-Tic6ox(j@g}#|OC<7m>64^=iSkGrlt)8`b}5RWrPx8RDN+*CL0hCE2pYt}>>WB4N{UEZa1=K|kbvOiU?))!aTYqb1WJa!Ya&LMa}P"
        "h~eCNM^2bd9Na5!k3*870t*Hwf|EhQLfN?JOs7n*I7waBPC?rlLO+ef00E5zFF#c%^nk{0oRlXg{}wLc`6T{*8V)IEw;v381YVJ;y1?grmzB"
        "5cJC+OLt7+hNuiw4SYq(j~n+R;^2B(=7!>CaRPwq)))wiPdN*I{MN1LZ^_hbJ^YlN|zsg2%-M;j*A<wZ8k)r7#xblYTQcb+S_N=R(xtkz0li"
        "ihPor`6wPX<N{z1D*nHzwWUxmgGsiH=xJkDt%kn#oK0k*w(EX}H9`?~t1{&$_%m0Qq_80a)@<s8i^V2R}(3{A5<~AW89`YubsN5uX8jqy;A~"
        "@qdSsp1ZPJCmT$a(MzKTwd7o)bg12Uk<WSCp+oywvg!&0>qbc254HLwdc@g%E7Dv`un+3Zc~7An?f}&R)Srs4U;F5q=V8o&Tv?RgV",
    ),
    "IQ2_S": (
        8,
        2,
        (8, 25, 43),
        "c-nnay-OoO6nEZZve|Jk*lgT&N&Jc&dkBjMhl-Vj5bOkrg%Gt6#ShXP2gfxY+<zcqV=dU-Rd<Dw|3VZYt&L!3W8s^b-OX%_Hao-2o8Q-aI{="
        "8_AfQ7VKUrN`%X*cZH?qSpxpFvFN<fJlrbv|a>1WQxPzQQIQuNTgboC>1$Sp<#F1HdSwI4_M1Q{nUcWZgcYbXWiR!wE8HH<?An65vFE`5-`H"
        "P%F)Jm=T2A0l_SBzTE4Iqr9K+6N@Im8y=T8%W$%)7zg}nLocRWAAd%c1B)Gp%BKEtg37^q8KSaAm^ZRn*#RZ^MYeWto{WW<qKnk^P7DeS(<|"
        "9C{e0h2f2R8G!WP7P~N1<ScVDD3w#vb+em0EWGhn}*Y1JxwF{=~Yj2-E?ZJG{dfM|r=6?AY``vd5R7PIV#_U8)>)6`NKbX9wxe>{5y^-eclf"
        "0D<a2qNXmFVb%JyNgMzU)S4(CkF|3C&QL4yV*JWoe@B_zlh-wfU0?uJ+R_zAIPlq^GM*T&!KOukdNCBMhdrW6(w7LJ8ZsgPvH|-R5%T9F_mQ"
        "M%}%JC!zk;A~k5Wc*<($tVn~lUeI$U<ND}^{}29S<;Pz(`-_1Gh0Tdqa86iz",
    ),
    "IQ3_XXS": (
        4,
        3,
        (4, 12, 20, 28, 36, 44, 52, 62),
        "c-kF}K~ID*6ol>Y=mSb06<WIncY$3=(2yAM>`lE9|Np<Sc$j2nGWq5X$UzERK7x{E%D|>BQq5pcrG>PDxph7_HAr{vBYHv*cdV0O)CtUZJ2G"
        "E2q_ob^ZK1ZScNzajl$8UJ(A<+MzzJ!U^-L>Ga`ILG4HKV^$6)gVVbCMD!8Pq?(`jAzLmQUhji9F8H_GYz%P^Zs!k$647z^#<AY<`zPTxiRU"
        "1f8S^LUw`_0KfFFR}rub!+w7=MPrG<OZ}~fB7vBnE",
    ),
    "IQ3_S": (
        4,
        3,
        (1, 3, 5, 7, 9, 11, 13, 15),
        "c-keA+fKtk3`E)SE%DwGn$m`XR8*u2-Vy)*XL!rgt}T1!*nUchkWvDWSOpXxff0=yCnjRBRTfQ*L=h6}D5^9m6AYw`3Z~5QRnqP#h<ZksOlW"
        "I2JTjHHhvu*f2Q<*EDI8gh)X)@8gF?y42SVs2mQ`~gRalT5AC>*iRB;)gg;$;aB{8HzdAv2IA}9_1=r|KO#Ng~P5Ai%&wPl^jh<7rXYsz(k_"
        "#1Crk>%Bfpp9)1TqnQ+VsVZjCftoB+-9)0Nri1yt`>dn^>DZbZob7N;cvFMM7K(W8${TplNK2ae8Y22dx3xK>voo$b=Q!Lz7p36=J~3#i`J8"
        "*UZuoxikHuF!0#39cWm~!EcX8LtXXs_(tlcSv~S1D7k-%LC@8vE?syxQvvogHdx=w@znAOj{s-R}55W",
    ),
    "IQ1_S": (
        8,
        2,
        (-1, 0, 1),
        "c-n1M+iu%N5bfN^CApR?^g>%&SvKIpi5=v3)Y<}EpnY&__#^t4MQosXD4Ze)&|k=zU6NMXJ_y>&>|D+{GyIB0xYmv<UPa;g3X9Hn*MzN5mrN"
        "S5TA0^<e>2{%V(6^LqE@Z(_knSnLbR6Ngt!x;ISzWWim;a2<MfA$V7|S#R}yg)$RtIv5B%cSUXr-MRYz$~ip4AB6Zhi>UAfo1eQqh6O7wh5V"
        "ch8sFFY^`NXUcO6S2)qqC9x56>fxE-gsqCY|<guU@IjqY2rFrtzH54`lACe6@yimT~a>mnMt@*OBG9oz#Z8#-@px15Wi0vWNv@6&68(n`58M"
        "9i+e^4U9-o|j?6ZJP=d)%2Qxky3Ubs;pWA{4vKinQw+>ufv&Dk<rmH0G>WOHRn8w{B&w=ZvRLc=qSkPZ$41GZor)LfU9HFR=>j;)R3M+2g=R"
        "MkF;o-l-?=~R#86LZW5<+)$GhF4+6TOd@Ap6|I!uMMXcI_}AsG}xn&<b@9HfVw$`q`;U3$fNtyTucKqlbeXxPzTJKFIC|8o4s-^S=Y12_QM1"
        ";Dzh0YL}~nnq81MbtH}zN=C3hIjVK*x^^@&M?h<*q?NiIFU{&AEOd*eoV^=9yk)PywX4NbTeM^z!%E~RC-}MicST(AQ5y;$l699{F60=NrII"
        "ZOg_o0|wnk3Dwo?0^DVFlI2ou67^-@W$4+Tq<Z`+bC?Q3_4H^m)a!<UYm4BZwh9&|ifA8C2=lCvI5Ua19NJeJ0jrdbuP5D88Is%!a$tC;><{"
        "E=$NFXF8pSY-rVpiCUNZu%x<wfxm)5l73N%X0MXe3zvZNd@f&uCQ8G!RN!B$psmDGkg#IeS#QBkzJoh;n=<#oU!NO%Gl-hm8(%llCf9=0-p_"
        "@!gU?HiV5_V0=Y6dLNB-QQ7h{wr024&LyGn625GpEdZ5eAK<*J&9az*m<JT~Rr<Qa*Q;zR0$M$ih?lsU&R%3!SJI)Y8LQn5a$qRJiWc`sbLl"
        "4wtcx871f{dQQ*a}&EWxmYrExX0|QOHtPv1y;CUhjPxNA0I9yp75z^XVmLi!bK1@a5F-Z8R{6Z;H1utx7WuGthbKt)rss4M)ixxAS0|AumaD"
        "{`wF0zLMFp9khf8F!!boTN`I^P^JF=^dwDDe&u{`!GzXT7L|8?lqDMlCg|yjQAh%XAf=^KA6>U4k36rJlU{sG_WnHsYqy7on_N$G?k)MT-3L"
        "N0Cd{B}_<bWGe-h6+R{6E!s%ic`B>!PB5q126q~B?PVi*gt%r|tygO{Qk_J-lW=dHO=`5h1Hx%eW1ImUdNn+xrt`t8MJBI`5jvR+^",
    ),
}
UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # IQ4's levels
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values, ggml's -0 without its sign


@functools.cache
def grid(name: str, device: torch.device) -> Tensor:
    """Grid `name`: float32 (points, coordinates)."""
    coordinates, width, levels, packed = GRIDS[name]
    points, point, difference, shift = [], 0, 0, 0
    for byte in zlib.decompress(base64.b85decode(packed)):
        difference |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            point += difference
            points.append([levels[point >> width * i & (1 << width) - 1] for i in range(coordinates)])
            difference = shift = 0
    return torch.tensor(points, dtype=torch.float32, device=device)


@functools.cache
def _levels(levels: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(levels, dtype=torch.float32, device=device)


def points(name: str, index: Tensor) -> Tensor:
    """Indices (n, m) -> their points in grid `name`, one after the other, float32 (n, m * coordinates)."""
    return grid(name, index.device)[index.int()].flatten(1)


def uneven(index: Tensor) -> Tensor:
    """uint8 0..15 -> IQ4's levels, float32."""
    return _levels(UNEVEN, index.device)[index.int()]


def e2m1(index: Tensor) -> Tensor:
    """Floating-point numbers of 4 bits, uint8 -> twice their values, float32."""
    return _levels(E2M1, index.device)[index.int()]


def signs(bits: Tensor) -> Tensor:
    """Bytes (n, m) -> -1 for each bit that is set, else 1, lowest first, float32 (n, m * 8)."""
    return numbers(bits, 1).float().mul_(-2).add_(1)


def even_signs(bits: Tensor) -> Tensor:
    """int32 (n, m), of which 7 bits count -> `signs` (n, m * 8): the eighth makes the number of minuses even."""
    bits = bits & 127
    odd = bits ^ bits >> 4
    odd = odd ^ odd >> 2
    odd = odd ^ odd >> 1
    return signs((bits | (odd & 1) << 7).byte())


def four_sevens(word: Tensor) -> Tensor:
    """int32 (n, m) -> their four lowest groups of 7 bits, int32 (n, m * 4)."""
    return torch.stack([word >> at & 127 for at in (0, 7, 14, 21)], -1).flatten(1)


def ternary_shift(minus: Tensor) -> Tensor:
    """1 -> -1/8, 0 -> 1/8, float32: what IQ1's points are shifted by."""
    return minus.float().mul_(-0.25).add_(0.125)
