"""Trace files: the three formats as they occur in the wild, and one clear line for each way to be wrong."""

import json
from pathlib import Path

import pytest

from paceline.errors import InputError
from paceline.lab.workload import load_workload

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
TENANTS = "req_id,client,arrival_s,prompt_len,output_len\n"


@pytest.fixture
def trace(tmp_path: Path) -> "TraceWriter":
    return TraceWriter(tmp_path)


class TraceWriter:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, content: str | bytes, name: str = "trace.dat") -> str:
        path = self._folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)


def mooncake(*records: dict[str, object]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def record(**changes: object) -> dict[str, object]:
    return {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]} | changes


def refused(source: str) -> str:
    """The message of the InputError, which must be one line and name the file."""
    with pytest.raises(InputError) as caught:
        load_workload(source)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(source)
    return message.removeprefix(source)


# ---------------------------------------------------------------- what is read


def test_azure(trace: TraceWriter) -> None:
    source = trace(
        AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n", "conv.csv"
    )
    workload = load_workload(source)
    assert workload.name == "conv"
    assert workload.arrival_s.tolist() == [0.0, 4.314579]
    assert workload.prompt_len.tolist() == [374, 396]
    assert workload.output_len.tolist() == [44, 109]
    assert workload.tenants == ("default",)
    assert workload.tenant.tolist() == [0, 0]
    assert workload.prefix_ids is None
    assert workload.prefix_block == 0


def test_azure_timestamps_keep_all_seven_decimals_and_zones(trace: TraceWriter) -> None:
    rows = [
        "2023-11-16 23:59:59.9999999,1,1",
        "2023-11-17 00:00:00,1,1",
        "2023-11-17T02:00:00.0000001+02:00,1,1",
        "2023-11-17 00:00:00.5Z,1,1",
    ]
    workload = load_workload(trace(AZURE + "\n".join(rows)))
    assert workload.arrival_s.tolist() == [0.0, 1e-7, 2e-7, 0.5000001]


def test_multi_tenant(trace: TraceWriter) -> None:
    source = trace(TENANTS + "0,13,0.000000,13,199\n1,2,0.207938,36,137\n2,x,0.441893,456,156\n3,2,1,1,1\n")
    workload = load_workload(source)
    assert workload.arrival_s.tolist() == [0.0, 0.207938, 0.441893, 1.0]
    assert workload.prompt_len.tolist() == [13, 36, 456, 1]
    assert workload.tenants == ("2", "13", "x")  # numbers by value, then names
    assert workload.tenant.tolist() == [1, 0, 2, 0]


def test_a_csv_without_clients_has_one_tenant(trace: TraceWriter) -> None:
    workload = load_workload(trace("arrival_s,prompt_len,output_len\n0,1,2\n1.5,3,4\n"))
    assert workload.tenants == ("default",)
    assert workload.rate == pytest.approx(1 / 1.5)


def test_mooncake(trace: TraceWriter) -> None:
    text = mooncake(
        record(),
        record(timestamp=3000, input_length=1024, hash_ids=[0, 2]),
        record(timestamp=5999.5, input_length=1025, hash_ids=[0, 2, 3]),
    )
    workload = load_workload(trace(text))
    assert workload.arrival_s.tolist() == [0.0, 3.0, 5.9995]
    assert workload.prompt_len.tolist() == [700, 1024, 1025]
    assert workload.prefix_ids == ((0, 1), (0, 2), (0, 2, 3))
    assert workload.prefix_block == 512


def test_mooncake_without_hash_ids(trace: TraceWriter) -> None:
    plain: dict[str, object] = {"timestamp": 0, "input_length": 7, "output_length": 5}
    workload = load_workload(trace(mooncake(plain, plain)))
    assert workload.prefix_ids is None
    assert workload.prefix_block == 0


def test_the_content_decides_not_the_name(trace: TraceWriter) -> None:
    assert load_workload(trace(mooncake(record()), "trace.csv")).prefix_block == 512
    assert load_workload(trace(TENANTS + "0,a,0,1,1\n", "trace.jsonl")).tenants == ("a",)


def test_columns_in_any_order_with_extras_blank_lines_and_spaces(trace: TraceWriter) -> None:
    text = (
        "\n note ,generatedtokens, ContextTokens,TIMESTAMP,\n"
        "\n"
        '"a, quoted\nnote", 4 ,"3",2023-11-16 00:00:01.0000000,\n'
        " , , , \n"
        ",6.0,5,2023-11-16 00:00:02.0000000\n"
    )
    # The last row lacks the header's empty last column, so it must be refused; with it, all is read.
    assert ":7: has 4 fields where the header has 5" in refused(trace(text))
    workload = load_workload(trace(text.rstrip("\n") + ",\n"))
    assert workload.prompt_len.tolist() == [3, 5]
    assert workload.output_len.tolist() == [4, 6]


def test_byte_order_mark_and_windows_line_ends(trace: TraceWriter) -> None:
    csv_text = (AZURE + "2023-11-16 00:00:00.0000000,3,4\n\n").replace("\n", "\r\n")
    assert load_workload(trace(b"\xef\xbb\xbf" + csv_text.encode())).prompt_len.tolist() == [3]
    json_text = ("\n" + mooncake(record()) + "\n").replace("\n", "\r\n")
    assert load_workload(trace(b"\xef\xbb\xbf" + json_text.encode())).prompt_len.tolist() == [700]


def test_arrivals_are_sorted_and_equal_ones_keep_the_order_of_the_file(trace: TraceWriter) -> None:
    text = TENANTS + "0,a,9,1,1\n1,b,5,2,1\n2,c,9,3,1\n3,d,5,4,1\n4,e,7,5,1\n"
    workload = load_workload(trace(text))
    assert workload.arrival_s.tolist() == [0.0, 0.0, 2.0, 4.0, 4.0]
    assert workload.prompt_len.tolist() == [2, 4, 5, 1, 3]
    assert [workload.tenants[i] for i in workload.tenant] == ["b", "d", "e", "a", "c"]
    late_first = mooncake(record(timestamp=9, hash_ids=[0, 1]), record(timestamp=5, hash_ids=[0, 2]))
    assert load_workload(trace(late_first)).prefix_ids == ((0, 2), (0, 1))


def test_times_may_count_from_any_start(trace: TraceWriter) -> None:
    workload = load_workload(
        trace("arrival_s,prompt_len,output_len\n1700000000.2500001,1,1\n1700000001,1,1\n1700000001.5e0,1,1\n")
    )
    assert workload.arrival_s.tolist() == [0.0, 0.7499999, 1.2499999]


def test_an_output_of_zero_counts_as_one(trace: TraceWriter) -> None:
    assert load_workload(
        trace(AZURE + "2023-11-16 00:00:00.0,3,0\n2023-11-16 00:00:01.0,3,0.0\n")
    ).output_len.tolist() == [1, 1]
    assert load_workload(trace(mooncake(record(output_length=0)))).output_len.tolist() == [1]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0,a,0,0,1", ":3: column 'prompt_len': '0' must be at least 1"),
        ("0,a,0,-5,1", ":3: column 'prompt_len': '-5' must be at least 1"),
        ("0,a,0,1,-1", ":3: column 'output_len': '-1' must be at least 0"),
        ("0,a,0,12.5,1", ":3: column 'prompt_len': '12.5' is not a whole number"),
        ("0,a,0,many,1", ":3: column 'prompt_len': 'many' is not a whole number"),
        ("0,a,0,1_000,1", ":3: column 'prompt_len': '1_000' is not a whole number"),
        ("0,a,0,nan,1", ":3: column 'prompt_len': 'nan' is not a whole number"),
        ("0,a,0,,1", ":3: column 'prompt_len': '' is empty"),
        ("0,a,0,2147483648,1", ":3: column 'prompt_len': '2147483648' must be at most 2147483647"),
        ("0,a,soon,1,1", ":3: column 'arrival_s': 'soon' is not a number"),
        ("0,a,1_0,1,1", ":3: column 'arrival_s': '1_0' is not a number"),
        ("0,a,nan,1,1", ":3: column 'arrival_s': 'nan' is not a finite number"),
        ("0,a,inf,1,1", ":3: column 'arrival_s': 'inf' is not a finite number"),
        ("0,a,-0.5,1,1", ":3: column 'arrival_s': '-0.5' must not be negative"),
        ("0,a,1e999999,1,1", ":3: column 'arrival_s': '1e999999' must be at most 9000000000"),
        ("0,a,1e300,1,1", ":3: column 'arrival_s': '1e300' must be at most 9000000000"),
        ("0,a, ,1,1", ":3: column 'arrival_s': ' ' is empty"),
        ("0, ,0,1,1", ":3: column 'client': ' ' is empty"),
        ("0,a,0,1", ":3: has 4 fields where the header has 5: '0,a,0,1'"),
        ("0,a,0,1,024,1", ":3: has 6 fields where the header has 5: '0,a,0,1,024,1'"),
    ],
)
def test_a_bad_csv_row_is_named(trace: TraceWriter, row: str, message: str) -> None:
    assert refused(trace(TENANTS + "0,a,0,1,1\n" + row + "\n")) == message


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("yesterday", "is not a timestamp like 2023-11-16 18:15:46.6805900"),
        ("1700000000", "is not a timestamp like 2023-11-16 18:15:46.6805900"),
        ("2023-13-16 00:00:00.0", "is not a valid timestamp (month must be in 1..12)"),
        ("2300-01-01 00:00:00.0", "must lie between the years 1970 and 2255"),
        ("1969-12-31 23:59:59.9", "must lie between the years 1970 and 2255"),
    ],
)
def test_a_bad_timestamp_is_named(trace: TraceWriter, value: str, message: str) -> None:
    assert refused(trace(AZURE + value + ",1,1\n")) == f":2: column 'TIMESTAMP': '{value}' {message}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", ":2: is not valid JSON (Expecting property name enclosed in double quotes at character 2)"),
        ("17", ":2: is not a JSON object: 17"),
        (json.dumps(record(input_length=0)), ":2: column 'input_length': 0 must be at least 1"),
        (json.dumps(record(input_length=True)), ":2: column 'input_length': True is not a whole number"),
        (json.dumps(record(input_length=None)), ":2: column 'input_length': None is not a whole number"),
        (json.dumps(record(output_length=1.5)), ":2: column 'output_length': 1.5 is not a whole number"),
        (json.dumps(record(timestamp=float("nan"))), ":2: column 'timestamp': nan is not a finite number"),
        (json.dumps(record(timestamp=[])), ":2: column 'timestamp': [] is not a number"),
        (json.dumps(record(timestamp=-1)), ":2: column 'timestamp': -1 must not be negative"),
        (json.dumps(record(hash_ids=3)), ":2: column 'hash_ids': 3 is not a list of block ids"),
        (
            json.dumps(record(hash_ids=[0, "b"])),
            ":2: column 'hash_ids': [0, 'b'] holds 'b', which is not a whole number of at least 0 in 64 bits",
        ),
        (
            json.dumps(record(hash_ids=[0, -1])),
            ":2: column 'hash_ids': [0, -1] holds -1, which is not a whole number of at least 0 in 64 bits",
        ),
        (
            json.dumps(record(hash_ids=[0])),
            ":2: column 'hash_ids': 1 block ids for a prompt of 700 tokens; blocks of 512 make 2",
        ),
        (
            json.dumps({"timestamp": 0, "input_length": 1, "output_length": 1}),
            ":2: lacks hash_ids, unlike the lines before; give it on all or none",
        ),
    ],
)
def test_a_bad_json_line_is_named(trace: TraceWriter, line: str, message: str) -> None:
    assert refused(trace(mooncake(record()) + line + "\n")) == message


def test_hash_ids_that_start_late_are_refused(trace: TraceWriter) -> None:
    plain: dict[str, object] = {"timestamp": 0, "input_length": 1, "output_length": 1}
    message = refused(trace(mooncake(plain, record())))
    assert message == ":2: has hash_ids, unlike the lines before; give it on all or none"


def test_json_beyond_all_measure_is_refused(trace: TraceWriter) -> None:
    assert ":1: cannot be read as JSON" in refused(trace('{"timestamp": ' + "9" * 5000 + "}\n"))
    assert ":1: cannot be read as JSON" in refused(trace('{"a": ' + "[" * 100_000))


def test_missing_json_keys_are_named(trace: TraceWriter) -> None:
    message = refused(trace(mooncake({"timestamp": 0, "tokens": 5})))
    assert message.startswith(
        ":1: lacks input_length, output_length; found 'timestamp, tokens'; supported are "
    )


def test_missing_columns_are_named_with_what_was_found(trace: TraceWriter) -> None:
    message = refused(trace("TIMESTAMP,ContextTokens,Answer\n2023-11-16 00:00:00.0,1,1\n"))
    assert message == (
        ": looks like Azure CSV but lacks the column GeneratedTokens; "
        "found 'TIMESTAMP, ContextTokens, Answer'; supported are "
        "Azure CSV (TIMESTAMP, ContextTokens, GeneratedTokens); "
        "multi-tenant CSV (arrival_s, prompt_len, output_len, optionally client); "
        "Mooncake JSON lines (timestamp, input_length, output_length, optionally hash_ids)"
    )
    message = refused(trace("client,prompt_len\n"))
    assert "looks like multi-tenant CSV but lacks the columns arrival_s, output_len; found" in message


def test_an_unknown_header_lists_the_formats(trace: TraceWriter) -> None:
    message = refused(trace("# A readme\n\nwith words\n"))
    assert message.startswith(": no known trace format: found the columns '# A readme'; supported are Azure")
    assert "Mooncake JSON lines" in message


def test_a_column_given_twice_is_refused(trace: TraceWriter) -> None:
    message = refused(trace("arrival_s,prompt_len,output_len,Prompt_Len\n0,1,1,2\n"))
    assert message == ": has the column 'prompt_len' more than once; keep one"


@pytest.mark.parametrize("content", ["", "\n \r\n\t\n", "\ufeff"])
def test_an_empty_file_is_refused(trace: TraceWriter, content: str) -> None:
    assert refused(trace(content)).startswith(": the file is empty; supported are ")


def test_a_header_alone_is_refused(trace: TraceWriter) -> None:
    assert refused(trace(AZURE + "\n\n")) == ": has a header but no requests"


def test_a_json_array_is_refused(trace: TraceWriter) -> None:
    assert "holds a JSON array; write one JSON object a line instead" in refused(
        trace(json.dumps([record()]))
    )


def test_binary_files_are_refused(trace: TraceWriter) -> None:
    message = refused(trace(b"\x1f\x8b\x08\x00\x00"))
    assert message == (
        ": is not a text file (byte 0x8b at position 1 is not UTF-8); unpack or convert it first"
    )
    assert "is not a text file (it holds zero bytes)" in refused(trace(b"abc\0def\n"))


def test_a_field_beyond_all_measure_is_refused(trace: TraceWriter) -> None:
    message = refused(trace(AZURE + '"' + "x" * 200_000 + '",1,1\n'))
    assert ":2: cannot be read as CSV (field larger than field limit" in message


def test_a_long_value_is_cut_in_the_message(trace: TraceWriter) -> None:
    message = refused(trace(TENANTS + f"0,a,0,{'7' * 500}x,1\n"))
    assert len(message) < 150
    assert "777..." in message


def test_a_directory_is_refused(tmp_path: Path) -> None:
    assert (
        refused(str(tmp_path))
        == ": is a directory; name one file in it, or give servegen:FOLDER for ServeGen clients"
    )


def test_an_unreadable_file_is_refused(trace: TraceWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    source = trace(AZURE)
    monkeypatch.setattr(Path, "read_bytes", deny)
    assert refused(source) == ": cannot be read (Permission denied)"
