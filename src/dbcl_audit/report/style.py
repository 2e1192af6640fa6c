"""How a page looks, and what it may load: nothing from the network, and no script."""

CSP = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
STYLE = """
:root{color-scheme:light dark;--ink:#1c2733;--muted:#5a6673;--line:#d5dce2;--paper:#fff;--soft:#f4f6f8;
--bad:#b3261e;--leak:#8a5300;--ok:#2d6a3e;--warn:#fff4dc;
--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#cc79a7;--c4:#b8860b;--c5:#8c564b;--c6:#7a3e9d}
@media (prefers-color-scheme:dark){:root{--ink:#e6ebf0;--muted:#a3afbb;--line:#3a4550;--paper:#14191e;--soft:#1f262d;
--bad:#ff8a80;--leak:#ffc06a;--ok:#8fd3a2;--warn:#3a2f17;
--c0:#5db2ea;--c1:#ff9354;--c2:#45cfa2;--c3:#ee9fcb;--c4:#e3bb52;--c5:#cfa195;--c6:#c8a0ea}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:76rem;padding:1rem clamp(.8rem,3vw,2.5rem) 3rem;background:var(--paper);color:var(--ink);
font:1rem/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;overflow-wrap:anywhere}
h1{font-size:1.6rem;line-height:1.25;margin:.6rem 0 0}h2{font-size:1.2rem;margin:2.2rem 0 .6rem}
h3{font-size:1rem;margin:1.2rem 0 .4rem}
p,ul,.warn{max-width:52rem}.muted{color:var(--muted)}.big{font-size:1.25rem;font-weight:650;margin:.4rem 0}
.verdicts{list-style:none;padding:0;display:grid;gap:.6rem}
.verdicts li{border:1px solid var(--line);border-left:6px solid;border-radius:6px;padding:.5rem .9rem}
.verdicts p{color:var(--ink);font-weight:400;margin:.2rem 0}.verdicts p.big{color:inherit;font-weight:650}
.verdicts p.muted{color:var(--muted)}
.scroll:focus-visible,summary:focus-visible{outline:3px solid var(--c0);outline-offset:2px}
.warn p{margin:.3rem 0}.warn{background:var(--warn);border-left:4px solid var(--leak);padding:.6rem .9rem}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:6px;margin:.5rem 0 1rem}
table{border-collapse:collapse;width:100%;font-size:.92rem}
th,td{text-align:left;vertical-align:top;padding:.45rem .7rem;border-bottom:1px solid var(--line);min-width:4.5rem;
overflow-wrap:break-word}
tbody th{font-weight:400}td.long{min-width:11rem}
td.w1,td.w2,td.w3,td.w4{min-width:10.5rem}td:empty,th:empty,td.num{min-width:0}tr:last-child>*{border-bottom:0}
thead th{background:var(--soft);vertical-align:bottom}
.w4{color:var(--bad);font-weight:650}.w3{color:var(--leak);font-weight:650}.w2{color:var(--leak)}.w1{color:var(--ok)}.w0{color:var(--muted)}
details{border:1px solid var(--line);border-radius:6px;margin:.5rem 0;padding:.3rem .8rem}
summary{cursor:pointer;padding:.25rem 0}
dl{margin:.4rem 0}dt{font-weight:650;margin-top:.5rem}dd{margin:0 0 0 1rem;max-width:52rem}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem}
figure{margin:0}.plot svg{display:block;width:100%;max-width:44rem;border-radius:6px;border:1px solid var(--line)}
.plot svg *{stroke-linejoin:round;stroke-linecap:butt}
.key{list-style:none;margin:.3rem 0;padding:0;font-size:.88rem}
.key i{display:inline-block;width:2rem;border-top:3px solid;margin-right:.5rem;vertical-align:middle}
.grid{display:flex;flex-wrap:wrap;gap:.9rem}.grid figure{max-width:100%}
.grid img{max-width:100%;background:#fff;border:1px solid var(--line)}
figcaption{font-size:.82rem;color:var(--muted)}
@media (max-width:600px){th,td{padding:.4rem .5rem;min-width:3.6rem}td.long{min-width:8rem}}
@media print{:root{--ink:#000;--muted:#444;--line:#bbb;--paper:#fff;--soft:#f2f2f2;--bad:#b3261e;--leak:#8a5300;
--ok:#2d6a3e;--warn:#fff;--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#cc79a7;--c4:#b8860b;--c5:#8c564b;--c6:#7a3e9d}body{max-width:none;font-size:10pt;padding:0}.scroll{overflow:visible}th,td,td.long{min-width:0}
details::details-content{content-visibility:visible;display:block}
figure,tr,.plot{break-inside:avoid}h2,h3{break-after:avoid}}
"""
