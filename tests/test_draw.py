"""Pictures: what they show, that nothing lies on anything else, and the command that makes them."""

import json
import re
import struct
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import jsonschema
import pygraphviz
import pytest
from test_cli import qfuse  # noqa: F401 (a fixture)

from qfuse import draw
from qfuse.describe import EdgeData, GraphData, NodeData, TensorData
from qfuse.picture import Request

SCHEMA = json.loads((Path(__file__).parent.parent / "docs" / "graph.schema.json").read_text("utf-8"))
REQUESTS = {
    "gdn": Request(part="gdn", config="tiny"),
    "gqa": Request(part="gqa", config="tiny"),
    "moe": Request(part="moe", config="tiny"),
    "moe_5": Request(part="moe", config="tiny", moe="moe_5"),
    "layer": Request(config="tiny"),
    "refused": Request(config="tiny", bits=6),
    "vanilla": Request(config="tiny", mode=0),
    "mode 1": Request(config="tiny", mode=1),
    "model": Request(part="model", config="tiny"),
    "large": Request(part="model", config="qwen3.5-35b-a3b"),
}


pytestmark = pytest.mark.usefixtures("no_6_bits")


def boxes(dot):
    """Every node, edge label and head of a frame, as (name, x0, y0, x1, y1) in points, as Graphviz lays them out."""
    graph = pygraphviz.AGraph(string=dot)
    graph.layout(prog="dot")
    found = []
    for node in graph.nodes():
        x, y = map(float, node.attr["pos"].split(","))
        w, h = (72 * float(node.attr[side]) for side in ("width", "height"))
        found.append((f"node {node}", x - w / 2, y - h / 2, x + w / 2, y + h / 2))
    for edge in graph.edges():
        if edge.attr["lp"]:
            x, y = map(float, edge.attr["lp"].split(","))
            lines = [line for line in edge.attr["label"].split("\\l") if line]
            w, h = 4.6 * max(map(len, lines)), 11.5 * len(lines)  # at 10 points
            found.append((f"label {edge.attr['label']}", x - w / 2, y - h / 2, x + w / 2, y + h / 2))
    return found


@pytest.mark.parametrize("name", REQUESTS)
def test_nothing_lies_on_anything_else(name):
    request = REQUESTS[name]
    placed = boxes(request.render("dot").decode())
    assert len(placed) > 8
    for i, (a, ax0, ay0, ax1, ay1) in enumerate(placed):
        for b, bx0, by0, bx1, by1 in placed[i + 1 :]:
            apart = ax1 <= bx0 + 1 or bx1 <= ax0 + 1 or ay1 <= by0 + 1 or by1 <= ay0 + 1
            assert apart, f"{a} and {b}"


def test_every_node_shows_its_number_name_and_bytes():
    text = REQUESTS["gdn"].render("dot").decode()
    for number, name in enumerate(["input_norm", "gdn_in_proj", "gdn_qk_norm", "gdn_step"], 1):
        assert f"<b>{number} {name}</b>" in text
    assert text.count("reads ") == 6
    assert "qkv 1×512 bf16" in text
    assert "4-5 kv_update" in REQUESTS["gqa"].render("dot").decode()


def test_state_is_dashed_and_nothing_else():
    graph = pygraphviz.AGraph(string=REQUESTS["gdn"].render("dot").decode())
    dashed = [edge.attr["label"].split()[0] for edge in graph.edges() if edge.attr["style"] == "dashed"]
    assert sorted(dashed) == ["conv_state", "conv_state_next", "state", "state_next"]


def test_a_refused_node_is_red_with_its_reason_and_the_legend_says_so():
    graph = pygraphviz.AGraph(string=REQUESTS["refused"].render("dot").decode())
    red = [node for node in graph.nodes() if node.attr["fillcolor"] == draw.COLOURS["refused"]]
    assert len(red) == 8
    for node in red:
        text = re.sub("<[^>]+>", " ", node.attr["label"])
        assert re.search(r"not on metal: wants w\w*\.bits\s+in \(2,\s+3,\s+4,\s+5,\s+8\),\s+got", text)
        assert "run by reference" in text
    legend = graph.get_node("legend").attr["label"]
    assert draw.TITLES["refused"] in legend
    assert draw.TITLES["refused"] not in REQUESTS["gdn"].render("dot").decode()


def test_the_legend_names_what_occurs():
    graph = pygraphviz.AGraph(string=REQUESTS["mode 1"].render("dot").decode())
    legend = graph.get_node("legend").attr["label"]
    assert "MLX or mlx-lm" in legend
    assert "metal kernel" in legend
    assert "reference" not in legend


def test_svg_and_png_are_what_they_say():
    svg = ET.fromstring(REQUESTS["moe"].render("svg"))
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    assert "2 route_swiglu" in "".join(svg.itertext())
    png = REQUESTS["moe"].render("png")
    width, height = struct.unpack(">II", png[16:24])
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert (width, height) > (600, 600)


def test_the_page_is_one_file_with_vanilla_beside_the_mode():
    page = REQUESTS["layer"].render("html").decode()
    assert not re.search(r"""(src|href)\s*=|@import|url\(|fetch\(""", page.replace("xlink:href", ""))
    assert not re.findall(r"https?://(?!www\.w3\.org)", page)
    assert page.index("gdn_layer_vanilla") < page.index('id="card"')
    details = json.loads(re.search(r"const details = (.*);\n", page)[1].replace("<\\/", "</"))
    drawn = set(re.findall(r'id="((?:left|right)-\d+-g0n\d+)"', page))
    assert drawn == set(details)
    step = next(shown for shown in details.values() if shown["title"] == "4 gdn_step")
    assert "The gated delta rule" in step["formula"]
    assert ["run by", "metal"] in step["rows"]
    assert "g: 1×4 f32 from gdn_in_proj" in step["inputs"]
    proj = next(shown for shown in details.values() if shown["title"] == "2 gdn_in_proj")
    assert "w_qkv: 512×256 8-bit gs 64, 139.3 kB" in proj["weights"]


def test_mermaid_has_every_node_and_edge():
    text = REQUESTS["gdn"].render("mermaid").decode()
    (graph,) = REQUESTS["gdn"].graphs()
    assert text.startswith("flowchart LR\n")
    assert len(re.findall(r"^  g0n\d+[\[(]", text, re.MULTILINE)) == len(graph.nodes)
    assert text.count("-.->") == 4
    pairs = {(edge.source, edge.target) for edge in graph.edges}
    assert text.count("-->") + 4 == len(pairs)
    assert f"fill:{draw.COLOURS['metal']}" in text


def test_json_holds_graphs_and_counts():
    data = json.loads(REQUESTS["layer"].render("json"))
    jsonschema.validate(data, SCHEMA)
    assert [graph["name"] for graph in data["graphs"]] == ["gdn_layer", "gqa_layer"]
    assert data["counts"]["token"]["2"]["dispatches"] == 3 * 9 + 11 + 6
    for mode in ("vanilla", "mode 1", "model"):
        jsonschema.validate(json.loads(REQUESTS[mode].render("json")), SCHEMA)


def test_text_in_a_node_cannot_break_the_picture():
    node = NodeData(name='a <b> & "c"', kind="op", op="x", backend="metal", formula="</script><b>", reads=1, writes=1)
    tensor = TensorData(name='t.q"<', shape=("N & M",), dtype="T", bytes=None)
    ends = [NodeData(name=name, kind=name) for name in ("input", "output")]
    edges = [
        EdgeData(source=source, target=target, tensor=tensor.name, arg="q", bytes=None)
        for source, target in (("input", node.name), (node.name, "output"))
    ]
    graph = GraphData(name="<g>", dims={}, nodes=(*ends, node), tensors=(tensor,), edges=tuple(edges))
    text = "".join(ET.fromstring(draw.render(draw.to_dot([graph, graph], title='"<'), "svg")).itertext())
    assert 'a <b> & "c"' in text
    assert 'q"< N & M T' in text
    page = draw.to_html([graph], [graph], title="<t>")
    assert page.count("</script>") == 1
    assert "<t>" not in page
    assert '"c"' not in draw.to_mermaid([graph])


def test_without_graphviz_the_error_names_the_extra(qfuse, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setitem(sys.modules, "pygraphviz", None)
    code, out, err = qfuse("graph", "moe", "--config", "tiny", "-o", tmp_path / "x.svg")
    assert (code, out) == (2, "")
    assert err == "qfuse: [graph] wants Graphviz for svg, got none: pip install 'qfuse[picture]'\n"
    assert qfuse("graph", "moe", "--config", "tiny", "--format", "mermaid")[0] == 0


def test_the_table_puts_vanilla_and_modes_side_by_side(qfuse):  # noqa: F811
    code, out, _ = qfuse("graph", "model", "--config", "tiny", "--device", "m3-ultra")
    assert code == 0
    rows = {
        cells[0]: cells[1:] for line in out.splitlines() if len(cells := re.split(r"\s*│\s*", line.strip("│ "))) > 3
    }
    counts = [0, 2, 3, 5, 6]  # vanilla traced, then declared and traced of each mode; bytes between them
    assert [rows["gdn layer × 3"][i] for i in counts] == ["45", "23", "23", "9", "9"]
    assert [rows["token"][i] for i in counts] == ["184", "96", "96", "44", "44"]
    assert "estimate" in rows
    assert "An estimate" in out
    assert "https://github.com/ml-explore/mlx/issues/4521" in out


def test_the_ending_of_the_file_is_the_format(qfuse, tmp_path):  # noqa: F811
    for ending in ("svg", "png", "html", "json", "dot", "mmd"):
        path = tmp_path / f"moe.{ending}"
        part = "gdn" if ending == "html" else "moe"
        code, out, err = qfuse("graph", part, "--config", "tiny", "-o", path)
        assert (code, out) == (0, "")
        assert err.startswith(f"wrote {path}: ")
        assert path.stat().st_size > 500


def test_a_checkpoint_is_shown_without_its_weights(qfuse, checkpoint, tmp_path):  # noqa: F811
    code, out, _ = qfuse("graph", "model", "--model", checkpoint)
    assert code == 0
    assert "184" in out
    code, _, err = qfuse("graph", "--model", tmp_path)
    assert code == 2
    assert err.startswith("qfuse: [model] wants config.json, got none in ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gdn", "--mode", "1"), "[graph] wants layer or model in mode 1, got gdn: it has no such graph"),
        (("moe", "--mode", "0"), "[graph] wants layer or model in mode 0, got moe: it has no such graph"),
        (("moe", "--format", "html"), "[graph] wants gdn, gqa, layer or model for html, got moe"),
        (("--mode", "0", "--format", "html"), "[graph] wants mode 1 or 2 beside vanilla in html, got 0"),
        (("head",), "Invalid value for "),
        (("--config", "gpt"), "[config] wants one of tiny, qwen3.5-35b-a3b, "),
        (("--config", "tiny", "--model", "x"), "[graph] wants a config or a model, got tiny and x"),
        (("--model", "x", "--bits", "4"), "[graph] wants the model's own bits, got 4"),
        (("--model", "x", "--committed"), "[committed] wants a config, got the model x"),
        (("model", "--config", "tiny", "--committed", "--backend", "metal"), "[committed] wants a CUDA GPU, got none"),
        (("--model", "/no/such/folder"), "[model] wants a folder, got /no/such/folder: there is no such folder"),
        (("--backend", "abacus"), "[backend] wants one of reference, "),
        (("--device", "abacus"), "[device] wants one of h200, "),
        (("--bits", "7"), "Invalid value for '--bits'"),
        (("--rows", "9"), "Invalid value for '--rows'"),
        (("--keys", "0"), "Invalid value for '--keys'"),
        (("-o", "layer.gif"), "[format] wants one of table, mermaid, dot, svg, png, html, json, got layer.gif"),
        (("-o", "/no/such/folder/x.svg"), "[output] wants a file in a folder that exists, got /no/such/folder/x.svg"),
    ],
)
def test_bad_input_is_one_line(qfuse, arguments, message):  # noqa: F811
    code, out, err = qfuse("graph", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"qfuse: {message}")
    assert err.count("\n") == 1
