"""The tasks of scripts/everyday.sh: each is a prompt, and a judge that looks at the folder and at the answer."""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

FILES = {
    "Cargo.toml": '[package]\nname = "demo"\nversion = "0.3.0"\nedition = "2024"\n\n[dependencies]\n'
    + "".join(f'crate-{i} = "{i}"\n' for i in range(1, 32)),
    "src/main.rs": 'mod config;\n\nfn main() {\n    let port = config::parse_config("port=80");\n    println!("{port:?}");\n}\n',
    "src/config.rs": "pub fn parse_config(text: &str) -> Option<u16> {\n    text.strip_prefix(\"port=\")?.parse().ok()\n}\n",
    "notes.txt": "call the plumber\nbook a table for six\nbuy oat milk\nreturn the library books\n",
    "config.ini": "[server]\nhost = localhost\nport = 8080\ndebug = false\n",
    "test_math.py": "assert 6 * 7 == 42\nassert sum(range(5)) == 10\nprint('2 tests passed')\n",
    "docs/install.md": "# Install\n\nRun make install.\n",
    "docs/usage.md": "# Usage\n\nRun demo --help.\n",
    "worker.py": "import time\n\n\ndef work():\n    # TODO: retry when the queue is down\n    time.sleep(1)\n",
    "counter.py": "cnt = 0\nfor x in [1, 2, 3]:\n    cnt = cnt + x\nprint(cnt)\n",
    "package.json": '{\n  "name": "demo-ui",\n  "version": "4.2.1",\n  "private": true\n}\n',
    "fruits.txt": "apple\ncherry\n",
    "title.txt": "A draft plan for the garden\n",
    "sales.csv": "month,amount\nJanuary,120\nFebruary,340\nMarch,95\n",
    "bai-viet.txt": "Chợ nổi Cái Răng ở Cần Thơ họp từ sáng sớm trên sông Hậu. Người bán treo hàng lên cây sào dài gọi là cây bẹo "
    "để khách nhìn thấy từ xa. Du khách thường đi thuyền lúc năm giờ sáng để ăn hủ tiếu và mua trái cây ngay trên ghe.\n",
    "ghi-chu.txt": "Cuộc họp nhóm dời sang thứ Năm lúc 9 giờ, phòng Sen.\nNhớ mang theo báo cáo quý.\n",
}


class Run:
    """What a judge sees: the folder afterwards, the answer, the calls."""

    def __init__(self, folder, result):
        self.folder, self.result = folder, result
        self.answer = result.get("answer") or ""
        self.calls = result.get("tool_calls") or []

    def text(self, name):
        path = self.folder / name
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    def says(self, *patterns):
        return all(re.search(p, self.answer, re.I) for p in patterns)

    def used(self, *names):
        return any(call["name"] in names and call["outcome"] == "ok" for call in self.calls)


VIETNAMESE = r"[ăâđêôơưạảấầẩẫậắằẳẵặẹẻẽếềểễệỉịọỏốồổỗộớờởỡợụủứừửữựỳỵỷỹ]"

TASKS = {
    "count-lines": ("How many lines does Cargo.toml have? Use a tool.", lambda r: r.says(r"\b37\b") and r.calls),
    "find-definition": ("Which file defines the function parse_config? Use a tool.", lambda r: r.says(r"config\.rs")),
    "read-line": ("What is written on line 3 of notes.txt?", lambda r: r.says("oat milk")),
    "summary-vietnamese": (
        "Read bai-viet.txt and summarise it in one sentence in Vietnamese.",
        lambda r: r.says(VIETNAMESE, "chợ nổi|Cái Răng|Cần Thơ") and r.calls,
    ),
    "create-file": (
        "Create a file hello.txt that contains the line: Hello, world",
        lambda r: r.text("hello.txt").strip() == "Hello, world",
    ),
    "edit-port": (
        "In config.ini change the port from 8080 to 9090.",
        lambda r: r.text("config.ini") == FILES["config.ini"].replace("8080", "9090"),
    ),
    "run-test": (
        "Run python3 test_math.py and tell me whether the tests pass.",
        lambda r: r.used("Bash") and r.says("pass") and not r.says("not pass|fail(?!ures?: 0)"),
    ),
    "sum-in-head": ("What is 2 + 2? Answer without a tool.", lambda r: r.says(r"\b4\b|four") and not r.used("Bash", "Write")),
    "hello": ("Hello!", lambda r: len(r.answer.strip()) > 0 and not r.used("Bash", "Write", "Edit")),
    "list-folder": ("Which files are in the folder docs?", lambda r: r.says(r"install\.md", r"usage\.md")),
    "count-python": ("How many Python files (*.py) are in this folder? Use a tool.", lambda r: r.says(r"\b(3|three)\b") and r.calls),
    "find-todo": ("Which file contains the word TODO? Use Grep.", lambda r: r.says(r"worker\.py")),
    "read-version": ("What is the version in package.json?", lambda r: r.says(r"4\.2\.1")),
    "write-in-folder": (
        "Create the file reports/summary.txt with the text: done",
        lambda r: r.text("reports/summary.txt").strip() == "done",
    ),
    "append-line": (
        "Add a new line with the word banana at the end of fruits.txt.",
        lambda r: r.text("fruits.txt").split() == ["apple", "cherry", "banana"],
    ),
    "shell-arithmetic": ("Run the shell command: echo $((17 * 23)) and tell me the number it prints.", lambda r: r.says("391")),
    "rename-variable": (
        "In counter.py rename the variable cnt to count everywhere.",
        lambda r: r.text("counter.py") == FILES["counter.py"].replace("cnt", "count"),
    ),
    "capital": ("What is the capital of France?", lambda r: r.says("Paris")),
    "question-vietnamese": (
        "Tệp ghi-chu.txt nói cuộc họp nhóm dời sang ngày nào? Trả lời bằng tiếng Việt.",
        lambda r: r.says("thứ Năm|thứ 5"),
    ),
    "largest-month": ("Read sales.csv: which month has the largest amount?", lambda r: r.says("February")),
}

VARIANTS = {"full": [], "no-rescue": ["--no-rescue"], "no-guard": ["--no-guard"]}


def run(args, task, seed, flags):
    prompt, judge = TASKS[task]
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) / "work"
        for name, text in FILES.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        command = [
            args.cob, "run", prompt, "--model", args.model, "--cwd", str(folder), "--output-format", "json", "--quiet",
            "--temperature", str(args.temperature), "--seed", str(seed), "--permission-mode", "accept-edits",
            "--allow", "Bash", "--offline", "--timeout", "300", *flags, *args.flag,
        ]  # fmt: skip
        env = dict(os.environ, XDG_STATE_HOME=str(pathlib.Path(scratch) / "state"))
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=env)
        try:
            result = json.loads(done.stdout)
        except ValueError:
            sys.exit(f"{task}, seed {seed}: no JSON result (exit {done.returncode}): {done.stderr[-500:]}")
        return bool(judge(Run(folder, result))), result


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--cob", required=True)
    p.add_argument("--model", default="qwen2.5-coder-1.5b-instruct-q4_k_m")
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument("--temperature", type=float, default=0.7)
    p.add_argument("--variants", default="full,no-rescue,no-guard")
    p.add_argument("--only")
    p.add_argument("--json", help="gets one line a run")
    p.add_argument("--flag", action="append", default=[], help="a further flag of `cob run`, as --flag=--no-guard")
    p.add_argument("--verbose", action="store_true", help="print the answers of failed runs")
    args = p.parse_args()
    args.cob = os.path.abspath(args.cob)
    tasks = args.only.split(",") if args.only else list(TASKS)
    log = open(args.json, "w", encoding="utf-8") if args.json else None
    for variant in args.variants.split(","):
        right = total = repeats = 0
        for task in tasks:
            marks = ""
            for seed in range(1, args.seeds + 1):
                ok, result = run(args, task, seed, VARIANTS[variant])
                marks += "+" if ok else "-"
                right, total = right + ok, total + 1
                repeats += result["stop_reason"] == "max_repeats"
                if log:
                    print(json.dumps({"variant": variant, "task": task, "seed": seed, "right": ok, "result": result}, ensure_ascii=False), file=log, flush=True)
                if args.verbose and not ok:
                    calls = [(c["name"], c["arguments"], c["outcome"]) for c in result["tool_calls"]]
                    print(f"    {task} seed {seed}: {result['stop_reason']}; {calls}; {result['answer']!r} {result['error'] or ''}")
            print(f"{variant:10} {task:20} {marks}", flush=True)
        print(f"{args.model}, {variant}: {right} of {total} right ({100 * right / total:.0f}%); {repeats} stopped by repeats", flush=True)


main()
