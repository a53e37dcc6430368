"""The bytes of a checkpoint folder that CheckpointWriter saved at commit 9f05c9d, before files had checksums."""

import base64
import pathlib
import zlib

# Its content: {"model": {"a": arange(6.0).view(2, 3), "b": arange(5, bfloat16)}, "lr": 1e-3, "step": 3,
# "betas": (0.9, 0.95), "name": "run"}
_FILES = {
    ".metadata": (
        "c-oCr-"
        "A>d%6fUr3`86b9qKPpvkq9xn?y@UCmx`dUY$3p{PG;IEGth0<&XfR&iC!!T$=o@<iSOV$nD_|3gJ;?<ySl5f7tPG+cfRwTzkV!yS"
        "+K42QHwH)T~_wEkTEBTq+Z!&)IDoQJe1`YmDs})Yc<jA9zW~lPx^yiQu9J$Ns-"
        "50iEe@BL$MWkG$>=uEOqyoh9ZiOAPhdCgCtY!IBL^aaw-gbE`uNRj45(S*{M#gihdAbSz7_Sn$NTg8gm@*D=c{wYBh~cs6+w2j1p"
        ";3vpEX#^Qfmg`cU6Mqy^O6YNGA^!{&=)wB>B>zuIwL1HNIU2&suG2!2KNZRo<0xdLLeF?OBusBxDi;hE5HjrN62bNOqg#mM&sm5}"
        "D6hSjig2HV6)ZMUom!3pUWk!UuV5wIC{$CQH2sR@!+p}Gp}?A{G~VC1rgKw@`N3bqJ}mU6$RCSY!V*283BMuRxj{_;{%F;qL0LDI"
        "HnZ_L>y@J-"
        "~GLWo;5J11(U9pEseG3t&1D=It9L8}q0uQjW&Lp4IoX`5|#G}~pn@ZMv4@OGHfF(e{W&?B+bY*)@s=+TQ_J;(g_Ay6rsr*;RDdGg"
        "O;_IW_XB_z|*Y6j)G?u35S<D89Y0AqAcQ5#EWc@?1wT3uhkYq(Y~x%HK5slJZg62{L-sZKVC=hxQh+J=iNX;iljGm-Tf21$(vG&}"
        "*G=FdVx*t@(R7&0dym(kq77-y$|VP}5=_l5z#PYwc|VZd*927yIJ8Wub4pTPmYuk+xyJpP+st>@Pn?)Bq-"
        "?$y^u^II_EHQhH^ebw$Y2XPN}+Y~+EM61bzNbrjT(*xMxsVMM}4=);LOH&jWT4Y=v|4(zk0oKJc4o<pP2@C@4tl6@28jJL|VOPtQ"
        "as_PVU$^M`1O"
    ),
    "__0_682a7a34-c421-48ac-aa5b-4b9bdf38e79c_0.distcp": (
        "c-rlkPi)&%9LHahCMkxs9S1rlQL=GpyDjPSzh@gX5=AH#vS3-"
        "Kjfy|A9LH@fyrllqFgR60t%P;}#A!RAT@m5}2M`CuZ9)veCcy!5;{Zd|5I2xG@NBo)i!;Y-"
        "8;P~eYg{MM`~803y!Z3xYggse5CFr&plghQM}cZ<OGZndsjIG9Sbp8Clt;kJ9b+{)TddYzxb@dZ{}!rpcDQotYxxlz?H$#~+~Z)T"
        "ox8Bmv@fcz($a0mXf`V4lc5ql2kjO8{Lf$BPT;hOo<)xW;cijKZQAOhuBfK5*tn=S+)A0<PTj46I8Q+F4eNFimq_*$a2OQZ0%~u%"
        "deg4!cBTBxPU>zA({No=_cW}X{`K(;u9E4gVHBKhYiO^yv~vY4<<-9V;o|xD-#-"
        "DEyBpxO)QqFs2Ht_UR2S<|jC!S9*rpW7NKoXEhy+1EjKr`s<RFAdfTF;15J?Q4Ky$pO^06CVjZ9%3Q@+ZCC$_DV?Ax&}<>Bif98E"
        "Uhct_-`M0BXr!%4^{I@*!sCYhwGbHjPaMmXG&XD$J{8!#MB?&WAl_)kQ5#BU&%c%rj*62xqNRnBBiZM8}&-"
        ";T_L&L1R#^WVwfjN`K2`SMWkIiNr~6U1cv`N7=ku3;yqe9BFK_Robh4ok;S4n<Rr*}*k8fZYIg_kf)MX-VRtfM`rT#6rnadF;!}p"
        "G3iqY~Oyu?)<@m9l6B&5q7i1jT_$hZnk)5!5`}u@cH-6^u`ZIaHb<M{Cg^ze@}t|>;|ygHtcAKL<tH!C-"
        "NLCu&m_Y*=<}~%0<DB?A3n4Zs}mbj$GpX2)p?do@}o)HVL<eK0b2@e{(2?aD`~XodAP7y8-"
        "NW_ZTbE9KOBdc}AjHfv0`gy*Tk{D++dG+x8Q7uN^GdkxRTEVW;86*Om&(iffn-"
        "rPz9H#W3rNt2dmct+W`*0#j4-o}A5XvJycERWX~YdoK8rvXb+jN@%5gdTPrn){vZWt@K$L$oN@#-O9)*Ik9eK-_f+DY3iD{Mh<nx"
        "+c3TUoT0gtH9S3MJ>*){ob|9z-s{e}$*VZq)fn;~ize?AU;x`b!gd5a+tF1suu^_{7XpH;t3~{;gkShr#mBXhr)d1W-"
        "`<aZvKR#?yYW8>_6Y20USLG;k)5XTT`b~Q$RNlfhQaS>nimCzW)R~2E;;f1kH@26PhKhgg#91=fc@D-"
        "e_(&>eqc{_%}7W1g(L{|?)@9Z@5xxBAh#!E6sesWMK*N)e#<CQoknpz-"
        "E9<E{O8RN=Kh~XQTCmJMm@bEz3CO{HS83LwQc#tyDxpKU%{EK#Q4PVXrGt>gS+wv+bFO}luD&l-"
        "x@BNUyM<>3Ke4wQnxkmU{5|3+|wvHiNzm9i4#Q@@dA_(<Efk+zw=6zQIMBPKaJw{o-"
        "+!vhx%s}KgSydxjhe_QTWJK^h<8eQCoUF=PnsePIYpM0u>}Os-Uu5UgH=#&xxv*S5>~2=W0@|zQBsQAZZFL)D6egmj46d5$w<"
    ),
}


def write(folder: pathlib.Path) -> None:
    """Writes the old checkpoint to a new folder."""
    folder.mkdir()
    for name, packed in _FILES.items():
        (folder / name).write_bytes(zlib.decompress(base64.b85decode(packed)))
