"""Texts that try to become markup, scripts, addresses or styles, to hide, to reorder, or to be too much."""

from __future__ import annotations

_RUNS = "window.pwned=1"

MARKUP = [
    f"<script>{_RUNS}</script>",
    f"</script><script>{_RUNS}</script>",
    f"<img src=x onerror={_RUNS}>",
    f"<img src=https://elsewhere.example/x.png onload={_RUNS}>",
    f"<svg onload={_RUNS}>",
    f"<svg><script>{_RUNS}</script></svg>",
    f'<iframe src="javascript:{_RUNS}"></iframe>',
    f'<iframe srcdoc="<script>parent.{_RUNS}</script>"></iframe>',
    f"<body onload={_RUNS}>",
    f"<details open ontoggle={_RUNS}>",
    f"<video><source onerror={_RUNS}></video>",
    f"<math><mtext><img src=x onerror={_RUNS}></mtext></math>",
    f'<a href="javascript:{_RUNS}" id=hostile>click</a>',
    f"<form action=javascript:{_RUNS}><button>send</button></form>",
    "<base href=https://elsewhere.example/>",
    "<link rel=stylesheet href=https://elsewhere.example/x.css>",
    "<meta http-equiv=refresh content='0;url=https://elsewhere.example/'>",
    "<object data=https://elsewhere.example/></object>",
    "<embed src=https://elsewhere.example/>",
    f"<template><script>{_RUNS}</script></template>",
    "<style>body{display:none}</style>",
    "<plaintext>",
    "<textarea><noscript><title>",
    "<!--",
    "-->",
    "<![CDATA[",
    "]]>",
    f'" onmouseover="{_RUNS}',
    f"' onfocus='{_RUNS}' autofocus='",
    f"`-{_RUNS}-`",
    "${window.pwned=1}",
    "{{constructor.constructor('window.pwned=1')()}}",
]
ENTITIES = ["&lt;script&gt;", "&#60;img src=x onerror=window.pwned=1&#62;", "&amp;amp;", "&nbsp;&shy;", "&#x202e;"]
ADDRESSES = [
    f"javascript:{_RUNS}",
    "JaVaScRiPt:alert(1)",
    "data:text/html,<script>alert(1)</script>",
    "vbscript:msgbox(1)",
    "https://elsewhere.example/?leak",
    "//elsewhere.example",
    "file:///etc/passwd",
    "#/run/0",
    "../../etc/passwd",
    "\\\\host\\share",
]
STYLES = [
    "color:red;background:url(https://elsewhere.example/)",
    "expression(alert(1))",
    "@import url(https://elsewhere.example/);",
    "</style><script>window.pwned=1</script>",
]
HIDDEN = [
    "\u202egnp.exe",
    "\u2066isolated\u2069",
    "\u200bzero\u200bwidth",
    "\ufeffmark",
    "a\u0301\u0301\u0301\u0301",
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "null\x00byte",
    "back\x08space",
    "carriage\rreturn",
    "\u2028line\u2029paragraph",
    "\U000e0041tag",
    "\u00adsoft\u00adhyphen",
    "\x9b31m",
    "\u115f\u3164fill",
]
LARGE = [
    "x" * 20_000,
    "wide " * 2_000,
    "\n" * 2_000,
    "\U0001f3f3\ufe0f\u200d\U0001f308\U0001f468\u200d\U0001f469\u200d\U0001f467" * 200,
    "Z\u0351\u036b\u0343\u036a" * 200,
    "\u65e5\u672c\u8a9e\u0627\u0644\u0639\u0631\u05e2\u05d1" * 200,
]

ALL = [*MARKUP, *ENTITIES, *ADDRESSES, *STYLES, *HIDDEN, *LARGE]
