"""The outcome as JUnit XML: one testcase per check, its values as properties.

REGRESSION is a failure, RUN FAILED and CANNOT JUDGE are errors. Of level warn all are skipped with their message, since
JUnit knows no warning.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

from spectune.gating.check import Check, Outcome

_VALUES = ("before", "now", "change", "low", "high", "detectable", "limit")
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(outcome: Outcome) -> str:
    suite = ElementTree.Element("testsuite", name="spectune gate")
    counts = {"failure": 0, "error": 0, "skipped": 0}
    for check in outcome.checks:
        case = ElementTree.SubElement(
            suite, "testcase", classname=_clean(f"spectune.gate.{check.where}"), name=_clean(check.what), time="0"
        )
        properties = ElementTree.SubElement(case, "properties")
        for name, value in (("verdict", check.verdict), ("kind", check.kind), ("level", check.level)):
            ElementTree.SubElement(properties, "property", name=name, value=value)
        for name in _VALUES:
            if (number := getattr(check, name)) is not None:
                ElementTree.SubElement(properties, "property", name=name, value=f"{number:.10g}")
        if check.verdict == "PASS":
            continue
        kind = _kind(check)
        counts[kind] += 1
        ElementTree.SubElement(case, kind, message=_clean(f"{check.verdict}: {check.message}"))
    suite.set("tests", str(len(outcome.checks)))
    suite.set("failures", str(counts["failure"]))
    suite.set("errors", str(counts["error"]))
    suite.set("skipped", str(counts["skipped"]))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return "<?xml version='1.0' encoding='utf-8'?>\n" + ElementTree.tostring(root, encoding="unicode") + "\n"


def _kind(check: Check) -> str:
    if check.level == "warn":
        return "skipped"
    return "failure" if check.verdict == "REGRESSION" else "error"


def _clean(text: str) -> str:
    """Without the characters that XML cannot hold."""
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
