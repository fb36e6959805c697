"""From MLX's own generated Metal text to C++, and what Metal would refuse in it though a C++ compiler does not.

MLX writes the signature around a kernel's body when a call is exported, which needs no Metal: that very text is what
the simulator compiles.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx

# Where runtime.cpp keeps the value of each attribute, in sim::at.
ATTRIBUTES: Mapping[str, int] = {
    "thread_position_in_threadgroup": 0,
    "thread_position_in_grid": 3,
    "thread_index_in_threadgroup": 6,
    "thread_index_in_simdgroup": 7,
    "simdgroup_index_in_threadgroup": 8,
    "thread_index_in_quadgroup": 9,
    "quadgroup_index_in_threadgroup": 10,
    "threadgroups_per_grid": 11,
    "threads_per_grid": 14,
    "grid_size": 14,
    "threads_per_threadgroup": 17,
    "dispatch_threads_per_threadgroup": 20,
    "threadgroup_position_in_grid": 23,
    "simdgroups_per_threadgroup": 26,
    "quadgroups_per_threadgroup": 27,
    "dispatch_simdgroups_per_threadgroup": 28,
    "dispatch_quadgroups_per_threadgroup": 29,
}
CONSTANTS = {"threads_per_simdgroup": "32", "thread_execution_width": "32", "grid_origin": "uint3{0, 0, 0}"}
MAX_BUFFERS = 31


@attrs.frozen
class Finding:
    """Something wrong with a kernel. severity: ``error`` or ``warning``. line: 0 where none can be told."""

    kind: str
    severity: str
    message: str
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}: " if self.line else ""
        return f"{place}{self.severity}: {self.kind}: {self.message}"


@attrs.frozen
class Parameter:
    """One parameter of MLX's signature. type: as written. buffer: its number, None of an attribute."""

    type: str
    name: str
    buffer: int | None


@attrs.frozen
class MetalText:
    """MLX's text of one kernel, without comments. header: what stands before the kernel. arguments: of its template."""

    name: str
    header: str
    signature: str
    body: str
    arguments: str
    parameters: tuple[Parameter, ...]


def exported(kernel: Callable[..., Any], inputs: Sequence[mx.array], **call: Any) -> MetalText:
    """What MLX would give to Metal for this call of a kernel that mx.fast.metal_kernel made."""
    found: list[Any] = []

    def record(event: dict[str, Any]) -> None:
        if event["type"] == "primitive" and event["name"] == "CustomKernel":
            found.extend(event["arguments"])

    mx.export_function(record, lambda *arrays: kernel(inputs=list(arrays), **call), *inputs)
    name, text = found[0], found[1]
    return parse(name, text)


def parse(name: str, text: str) -> MetalText:
    """The parts of a text that MLX generated for the kernel ``name``."""
    text, _, instance = text.rpartition("\ntemplate [[host_name(") if "[[host_name(" in text else (text, "", "")
    arguments = re.search(rf"decltype\({re.escape(name)}(<.*?>)\)", instance)
    start = re.search(rf"(?:template <[^\n]*>\n)?\[\[kernel\]\] void {re.escape(name)}\(\n", text)
    assert start, "a text with its kernel in it"
    end = text.index(") {\n", start.end()) + 4
    parameters = []
    for line in text[start.end() : end - 4].split(",\n"):
        kind, called, attribute = re.fullmatch(r"\s*(.*\W)(\w+) \[\[(.*)\]\]", line).groups()  # type: ignore[union-attr]
        buffer = re.fullmatch(r"buffer\((\d+)\)", attribute)
        parameters.append(Parameter(kind.strip(), called, int(buffer[1]) if buffer else None))
    body = text[end:].rstrip().removesuffix("}")
    return MetalText(
        name,
        without_comments(text[: start.start()]),
        text[start.start() : end],
        without_comments(body),
        arguments[1] if arguments else "",
        tuple(parameters),
    )


def without_comments(text: str) -> str:
    """The text with comments blank, its lines where they were."""
    return re.sub(
        r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/',
        lambda m: m[0] if m[0][0] == '"' else " " + "\n" * m[0].count("\n"),
        text,
        flags=re.DOTALL,
    )


LITERAL = re.compile(r"(?<![\w.])((?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)([fFhH]?)(?![\w.])")
SHARED = re.compile(
    r"\bthreadgroup\s+((?:unsigned )?[\w:]+(?:<[^;>]*>)?)\s+"
    r"(\w+\s*(?:\[[^\];]*\]\s*)*(?:,\s*\w+\s*(?:\[[^\];]*\]\s*)*)*)(=[^;]*)?;"
)


def cpp(text: MetalText, *, types: bool = False) -> str:
    """The C++ that stands for ``text`` behind shim.h. types: the form that is only type-checked."""
    header, body = (_floats(part) for part in (text.header, text.body))
    if types:
        body = SHARED.sub(lambda m: f"static threadgroup {m[1]} {m[2]};", body)
    else:
        body = _arena(body)
        body = re.sub(r"\breturn\s*;", "{sim::left();return;}", body)
    given = [_argument(parameter) for parameter in text.parameters]
    return "\n".join([
        '#include "shim.h"' if not types else "#define SIM_TYPES\n" + '#include "shim.h"',
        header,
        re.sub(r" \[\[.*?\]\]", "", text.signature.replace("[[kernel]] ", "")) + body + "}",
        f'extern "C" void sim_kernel() {{ {text.name}{text.arguments}({", ".join(given)}); }}',
    ]) + "\n"  # fmt: skip


def _argument(parameter: Parameter) -> str:
    if parameter.buffer is not None:
        pointer = re.sub(r"\s*&$", "*", parameter.type)
        star = "*" if parameter.type.endswith("&") else ""
        return f"{star}({pointer})(size_t)sim::buffers[{parameter.buffer}]"
    if parameter.name in CONSTANTS:
        return CONSTANTS[parameter.name]
    place = ATTRIBUTES[parameter.name]
    if parameter.type == "uint":
        return f"sim::at[{place}]"
    return f"uint3{{{', '.join(f'sim::at[{place + i}]' for i in range(3))}}}"


def _floats(text: str) -> str:
    """Give every floating literal the suffix f, since Metal has no double."""
    lines = text.split("\n")
    for i, line in enumerate(lines):
        if not line.lstrip().startswith(("#line", "#include")):
            lines[i] = LITERAL.sub(lambda m: f"half({m[1]}f)" if m[2] in ("h", "H") else f"{m[1]}f", line)
    return "\n".join(lines)


def _arena(body: str) -> str:
    """Make each threadgroup variable a reference into the memory that runtime.cpp keeps for a threadgroup."""
    count = 0

    def declare(match: re.Match[str]) -> str:
        nonlocal count
        parts = []
        for declarator in re.findall(r"(\w+)\s*((?:\[[^\]]*\]\s*)*)", match[2]):
            name, sizes = declarator
            kind, place = (
                f"{name}_shared",
                f'sim::shared({count}, sizeof({name}_shared), alignof({match[1]}), "{name}")',
            )
            parts.append(f"typedef {match[1]} {kind}{sizes}; auto& {name} = *({kind}*){place};")
            count += 1
        return " ".join(parts) + "\n" * match[0].count("\n")

    return SHARED.sub(declare, body)


def lint(text: MetalText) -> Iterator[Finding]:
    """What Metal refuses and C++ takes, or what works for one shape of an input and not for the next."""
    buffers = sum(parameter.buffer is not None for parameter in text.parameters)
    if buffers > MAX_BUFFERS:
        yield Finding("too many buffers", "error", f"{buffers}, and Metal binds at most {MAX_BUFFERS}")
    for part, place in ((text.header, "header"), (text.body, "body")):
        for pattern, kind, message in (*EVERYWHERE, *(HEADER if place == "header" else BODY)):
            for match in re.finditer(pattern, part):
                yield Finding(kind, "error", message.format(*match.groups()), *_place(part, match.start()))
    yield from _program_scope(text.header)
    yield from _recursion(text.header)
    for name in (*ATTRIBUTES, *CONSTANTS):
        used = re.search(rf"\b{name}\b", text.header)
        if used and not any(parameter.name == name for parameter in text.parameters):
            message = f"{name} stands in the header only; MLX declares it where the body mentions it"
            yield Finding("undeclared attribute", "error", message, *_place(text.header, used.start()))
    inputs = [each for each in text.parameters if each.buffer is not None and each.type.startswith("const")]
    for parameter in inputs:
        cast = rf"\(\s*(?:const\s+)?device\s+[\w:<>]+(?:\s+const)?\s*\*\s*\)\s*\(?\s*&?\s*{parameter.name}\b"
        for match in re.finditer(cast, text.body):
            message = f"{parameter.name} is in constant memory when it has fewer than 8 elements"
            yield Finding("address space of a small input", "warning", message, *_place(text.body, match.start()))


EVERYWHERE = (
    (r"\bdouble\b", "double", "Metal has no double"),
    (r"\bstd\s*::", "standard library", "Metal has no std"),
    (r"\b(printf|malloc|free|memcpy|memset|assert|abort|exit)\s*\(", "standard library", "Metal has no {0}"),
    (r"\b(new|delete)\b", "new", "Metal has no {0}"),
    (r"\bgoto\b", "goto", "Metal has no goto"),
    (r"\bvirtual\b", "virtual", "Metal has no virtual functions"),
    (r"\b(throw|try|catch|dynamic_cast|typeid)\b", "exceptions", "Metal has no {0}"),
    (r"\b[\w:]+[\s*&]*\(\s*\*\s*\w+\s*\)\s*\(", "function pointer", "Metal has no pointers to functions"),
)
HEADER = ((SHARED, "threadgroup variable in a helper", "Metal takes {1} in a kernel's own body only"),)
BODY = (
    (r"\bstatic\b(?!\s+constexpr)", "static local", "Metal has no static variables in functions"),
    (
        SHARED.pattern.replace("(=[^;]*)?;", "(?:=[^;]*);"),
        "initialised threadgroup variable",
        "{1} starts with no value",
    ),
)


def _place(text: str, index: int) -> tuple[str, int]:
    """File and line at ``index``, by the last #line before it."""
    before = text[:index]
    marks = list(re.finditer(r'^#line (\d+) "(.*)"$', before, re.MULTILINE))
    if not marks:
        return "", before.count("\n") + 1
    return marks[-1][2], int(marks[-1][1]) + before[marks[-1].end() :].count("\n") - 1


def _program_scope(header: str) -> Iterator[Finding]:
    """Variables of the program that are not in the constant address space."""
    outer = _outermost(header)
    pattern = (
        r"(?:^|(?<=[;}\n]))[ \t]*((?:static |const |constexpr |inline |constant )*[\w:]+ +(\w+)\s*(?:\[[^\]]*\])*\s*=)"
    )
    for match in re.finditer(pattern, outer):
        if "constant " not in match[1] and not re.match(r"\s*(using|typedef|template|return)\b", match[1]):
            message = f"{match[2]} wants the constant address space"
            yield Finding("program-scope variable", "error", message, *_place(header, match.start(2)))


def _outermost(text: str) -> str:
    """The text with everything between braces and parentheses blank."""
    depth, out = 0, []
    for letter in text:
        depth -= letter in "})"
        out.append(letter if depth <= 0 or letter == "\n" else " ")
        depth += letter in "{("
    return "".join(out)


def _recursion(header: str) -> Iterator[Finding]:
    for match in re.finditer(r"\b(\w+)\s*\([^;{}()]*\)\s*(?:const\s*)?\{", header):
        depth, end = 1, match.end()
        while depth and end < len(header):
            depth += {"{": 1, "}": -1}.get(header[end], 0)
            end += 1
        again = re.search(rf"\b{match[1]}\s*\(", header[match.end() : end])
        if again and match[1] not in ("if", "for", "while", "switch"):
            place = _place(header, match.end() + again.start())
            yield Finding("recursion", "error", f"{match[1]} calls itself", *place)
