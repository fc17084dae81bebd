"""ServeGen clients: folders and archives, rates by window, pictures, and one clear line for each way to be wrong.

With PACELINE_DATA naming a folder that holds servegen_mm-image.tar.gz, the generator fitted to it is compared with it.
"""

import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import InputError
from paceline.lab.workload import Workload, load_workload
from paceline.lab.workload.workload import QUANTILE_LEVELS, dispersion, gap_variation, rank_correlation

PICTURES = {
    "text_tokens": "{50: 0.25, 60: 0.75}",
    "image_tokens": "{16: 0.5, 1280: 0.5}",
    "audio_tokens": "{0: 1.0}",
    "image_count": "{0: 0.2, 1: 0.6, 3: 0.2}",
    "output_tokens": "{0: 0.1, 9: 0.9}",
}
LANGUAGE = {"input_tokens": "{100: 1.0}", "output_tokens": "{7: 1.0}"}
REASONING = {**LANGUAGE, "reason_ratio": "{0.0: 0.5, 0.5: 0.5}"}
POISSON = "0,5.0,1,Gamma,1.0,0.2\n600,10.0,1,Gamma,1.0,0.1\n"
LATE = "0,0,0,,0,0\n600,2.5,4,Weibull,0.3,0.02\n"


def folder(path: Path, *clients: tuple[str, dict[str, str]]) -> str:
    path.mkdir(parents=True, exist_ok=True)
    for number, (rates, fields) in enumerate(clients):
        (path / f"chunk-{number}-trace.csv").write_text(rates)
        (path / f"chunk-{number}-dataset.json").write_text(json.dumps({"0": fields, "600": fields}))
    return f"servegen:{path}"


def columns(workload: Workload) -> tuple[list[float], ...]:
    images = workload.images
    pictures = [] if images is None else [*images.first.tolist(), *images.tokens.tolist()]
    lengths = (workload.arrival_s, workload.prompt_len, workload.output_len, workload.tenant)
    return (*(column.tolist() for column in lengths), pictures)


def test_clients_keep_their_rates_in_each_window(tmp_path: Path) -> None:
    source = folder(tmp_path / "two", (POISSON, LANGUAGE), (LATE, REASONING))
    workload = load_workload(source, num_requests=10_500)
    assert workload.name == "two" and workload.tenants == ("0", "1") and workload.images is None
    early, late = workload.arrival_s < 600.0, workload.arrival_s >= 600.0
    assert np.count_nonzero(early) == 3000 and not workload.tenant[early].any()
    assert [np.count_nonzero(workload.tenant[late] == client) for client in (0, 1)] == [6000, 1500]
    assert set(workload.prompt_len.tolist()) == {100} and set(workload.output_len.tolist()) == {7}
    with pytest.raises(InputError, match="makes 10500 requests in a day, 20000 were asked for"):
        load_workload(folder(tmp_path / "two"), num_requests=20_000)


def test_a_rate_is_that_of_all_clients_together_and_keeps_their_shares(tmp_path: Path) -> None:
    source = folder(tmp_path, (POISSON, LANGUAGE), (LATE, LANGUAGE))
    workload = load_workload(source, num_requests=20_000, rate=20.0)
    assert workload.rate == pytest.approx(20.0, rel=0.005)
    late = workload.tenant[workload.arrival_s >= 600.0]
    assert np.mean(late) == pytest.approx(0.2, abs=0.02)
    evenly = load_workload(source, num_requests=500, rate=20.0, arrivals="constant")
    assert np.diff(evenly.arrival_s) == pytest.approx(0.05)


def test_gaps_are_those_of_the_client(tmp_path: Path) -> None:
    even = "0,20.0,0.1,Gamma,100.0,0.0005\n"
    bursts = "0,20.0,3,Weibull,0.4,0.02\n"
    tiny = "0,20.0,900,Gamma,1e-5,1.0\n"
    found = [
        gap_variation(load_workload(folder(tmp_path / str(at), (rates, LANGUAGE))))
        for at, rates in enumerate((even, POISSON.replace("600,10", "600,5"), bursts))
    ]
    assert found[0] == pytest.approx(0.1, rel=0.05)
    assert found[1] == pytest.approx(1.0, rel=0.05)
    assert found[2] > 2.5
    assert len(load_workload(folder(tmp_path / "tiny", (tiny, LANGUAGE)))) == 12_000 - 2_000


def test_pictures_are_part_of_the_prompt(tmp_path: Path) -> None:
    workload = load_workload(folder(tmp_path, (POISSON, PICTURES)))
    images = workload.images
    assert images is not None
    assert set(workload.text_len.tolist()) == {50, 60}
    assert set(images.tokens.tolist()) == {16, 1280}
    assert np.bincount(images.counts()) / len(workload) == pytest.approx([0.2, 0.6, 0.0, 0.2], abs=0.02)
    assert set(workload.output_len.tolist()) == {1, 9}  # an answer has at least one token
    request = int(np.flatnonzero(images.counts() == 3)[0])
    tokens = [tokens for tokens, _ in images.of(request)]
    assert len(tokens) == 3 and sum(tokens) + workload.text_len[request] == workload.prompt_len[request]
    assert len(set(images.content.tolist())) == len(images.content)


def test_a_part_of_a_workload_has_its_own_pictures(tmp_path: Path) -> None:
    workload = load_workload(folder(tmp_path, (POISSON, PICTURES)), num_requests=300)
    chosen = workload.take(np.array([7, 200, 3]), arrival_s=np.zeros(3))
    assert workload.images is not None and chosen.images is not None
    assert [chosen.images.of(i) for i in range(3)] == [workload.images.of(i) for i in (7, 200, 3)]
    assert chosen.prompt_len.tolist() == workload.prompt_len[[7, 200, 3]].tolist()
    clipped, touched = workload.clipped(1000)
    assert touched and clipped.images is not None and clipped.prompt_len.max() < 1000


def test_the_first_requests_do_not_depend_on_how_many_are_asked_for(tmp_path: Path) -> None:
    source = folder(tmp_path, (POISSON, PICTURES), (LATE, PICTURES))
    some, more = (load_workload(source, num_requests=count, seed=3) for count in (2_500, 6_000))
    assert columns(some) == columns(more.head(2_500))
    assert columns(load_workload(source, num_requests=100, seed=4)) != columns(some.head(100))
    assert columns(load_workload("mm-image", num_requests=200)) == columns(
        load_workload("mm-image", num_requests=900).head(200)
    )


@pytest.mark.parametrize("ending", ["tar", "tar.gz"])
def test_an_archive_is_read_as_its_folder_is(tmp_path: Path, ending: str) -> None:
    source = folder(tmp_path / "mm", (POISSON, PICTURES))
    (tmp_path / "mm" / "README.md").write_text("not a client")
    archive = tmp_path / f"mm.{ending}"
    with tarfile.open(archive, "w:gz" if ending.endswith("gz") else "w") as made:
        made.add(tmp_path / "mm", "data/multimodal/mm")
    found = load_workload(f"servegen:{archive}", num_requests=200)
    assert columns(found) == columns(load_workload(source, num_requests=200)) and found.name == "mm"


def broken(name: str, content: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / name).write_text(content)

    return change


def dataset(**fields: str) -> str:
    return json.dumps({"0": {**LANGUAGE, **fields}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (broken("chunk-0-trace.csv", "0,1,1,Gamma,1\n"), "chunk-0-trace.csv:1: has 5 fields"),
        (broken("chunk-0-trace.csv", "0,x,1,Gamma,1,1\n"), "holds something else than numbers"),
        (broken("chunk-0-trace.csv", "0,-1,1,Gamma,1,1\n"), "a rate and a second must be at least 0"),
        (broken("chunk-0-trace.csv", "0,1,1,Pareto,1,1\n"), "gaps must be Gamma or Weibull"),
        (broken("chunk-0-trace.csv", "0,1,1,Gamma,0,1\n"), "gaps must be Gamma or Weibull"),
        (broken("chunk-0-trace.csv", POISSON + POISSON), "does not come after the line before"),
        (broken("chunk-0-trace.csv", "\n"), "is empty"),
        (broken("chunk-0-trace.csv", "0,0,0,,0,0\n"), "none of its clients asks for anything"),
        (broken("chunk-0-dataset.json", "[1]"), "is no JSON object of seconds and histograms"),
        (broken("chunk-0-dataset.json", "{"), "is no JSON object of seconds and histograms"),
        (broken("chunk-0-dataset.json", '{"0": {"input_tokens": 5}}'), "'input_tokens' is no histogram"),
        (broken("chunk-0-dataset.json", dataset(input_tokens="{}")), "has no 'input_tokens'"),
        (broken("chunk-0-dataset.json", dataset(input_tokens="{5}")), "is no histogram such as"),
        (broken("chunk-0-dataset.json", dataset(input_tokens="{5: 0.5}")), "its shares add up to 0.5"),
        (broken("chunk-0-dataset.json", dataset(input_tokens="{-1: 1.0}")), "lengths must lie between"),
        (broken("chunk-0-dataset.json", dataset(audio_tokens="{7: 1.0}")), "has audio_tokens"),
        (broken("chunk-1-trace.csv", POISSON), "client 1 has no chunk-1-dataset.json"),
        (lambda path: (path / "chunk-0-trace.csv").unlink(), "client 0 has no chunk-0-trace.csv"),
        (lambda path: folder(path / "other", (POISSON, LANGUAGE)) and None, "has client 0 twice"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    source = folder(tmp_path, (POISSON, LANGUAGE))
    change(tmp_path)
    with pytest.raises(InputError) as caught:
        load_workload(source)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_path_that_holds_no_clients_is_refused(tmp_path: Path) -> None:
    for name, message in (
        ("nothing", "no such folder"),
        ("empty", "holds no chunk-N"),
        ("text", "is neither"),
    ):
        path = tmp_path / name
        if name == "empty":
            path.mkdir()
        if name == "text":
            path.write_text("no archive")
        with pytest.raises(InputError, match=message):
            load_workload(f"servegen:{path}")
    with pytest.raises(InputError, match="servegen:"):
        load_workload(str(tmp_path / "empty"))


# -- the generator beside the trace --------------------------------------------------------------------------------

# Of the whole day in the file (alibaba/ServeGen, Apache-2.0): mean, and quantiles at 10, 25, 50, 75, 90 and 99 %.
TEXT = (570.0, (41, 76, 106, 1029, 1911, 3068))
PICTURE = (550.0, (6, 114, 406, 1156, 1224, 1269))
COUNT = (1.59, (1, 1, 1, 1, 3, 9))
OUTPUT = (129.5, (6, 29, 100, 185, 264, 586))


def quantities(workload: Workload) -> list[tuple[float, list[float]]]:
    assert workload.images is not None
    parts = (workload.text_len, workload.images.tokens, workload.images.counts(), workload.output_len)
    return [(float(each.mean()), np.quantile(each, QUANTILE_LEVELS).tolist()) for each in parts]


@pytest.mark.parametrize("seed", range(3))
def test_mm_image_has_the_quantiles_of_the_service(seed: int) -> None:
    workload = load_workload("mm-image", seed=seed)
    for (mean, found), (wanted_mean, wanted) in zip(
        quantities(workload), (TEXT, PICTURE, COUNT, OUTPUT), strict=True
    ):
        assert found == pytest.approx(wanted, rel=0.1)
        assert mean == pytest.approx(wanted_mean, rel=0.05)
    assert rank_correlation(workload.text_len.astype(np.int32), workload.output_len) == pytest.approx(
        0.61, abs=0.05
    )
    assert workload.rate == pytest.approx(9.47, rel=0.03)
    assert dispersion(workload, window_s=10.0) == pytest.approx(5.1, rel=0.15)


@pytest.mark.skipif(
    not os.path.exists(os.path.join(os.environ.get("PACELINE_DATA", ""), "servegen_mm-image.tar.gz")),
    reason="needs PACELINE_DATA with servegen_mm-image.tar.gz",
)
def test_mm_image_beside_the_file() -> None:
    path = Path(os.environ["PACELINE_DATA"]) / "servegen_mm-image.tar.gz"
    trace = load_workload(f"servegen:{path}", num_requests=810_000)
    assert trace.rate == pytest.approx(9.5, rel=0.02) and len(trace.tenants) == 35
    for (mean, found), (wanted_mean, wanted) in zip(
        quantities(load_workload("mm-image", num_requests=100_000)), quantities(trace), strict=True
    ):
        assert found == pytest.approx(wanted, rel=0.1)
        assert mean == pytest.approx(wanted_mean, rel=0.05)
