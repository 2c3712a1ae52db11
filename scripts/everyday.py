"""The tasks of scripts/everyday.sh: each is a prompt, and a judge that looks at the folder and at the answer.

TASKS is the set that prompts and settings were chosen on. HELD_OUT is of the same kinds with other files and words; nothing was
chosen on it, so that its rate says what a new task may expect.
"""

import argparse
import collections
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


# The folder of the held-out set.
MORE_FILES = {
    **FILES,
    "settings.json": '{\n  "theme": "light",\n  "language": "vi",\n  "font_size": 12\n}\n',
    "lib/shapes.py": "import math\n\n\ndef circle_area(r):\n    return math.pi * r * r\n\n\ndef square_area(a):\n    return a * a\n",
    "poem.txt": "Roses are red\nViolets are blue\nHorses pull carts\nAnd so can you\nOver the hill\n",
    "check.sh": "echo checking\necho all good\nexit 0\n",
    "broken.py": "print('start')\nraise ValueError('no such horse')\n",
    "contacts.txt": "Lan: 0903 111 222\nMinh: 0912 333 444\nHoa: 0987 555 666\n",
    "tin-tuc.txt": "Sáng nay Đà Lạt có mưa nhỏ, nhiệt độ khoảng 18 độ. Chợ hoa vẫn đông khách vì gần Tết. "
    "Người bán cho biết hoa hồng và hoa lan bán chạy nhất.\n",
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

HELD_OUT = {
    "count-poem": ("Count the lines of poem.txt with a tool.", lambda r: r.says(r"\b(5|five)\b") and r.calls),
    "find-function": ("In which file is the function circle_area defined?", lambda r: r.says(r"shapes\.py")),
    "read-second": ("What does the second line of poem.txt say?", lambda r: r.says("violets are blue")),
    "summary-news": (
        "Đọc tệp tin-tuc.txt và tóm tắt bằng một câu tiếng Việt.",
        lambda r: r.says(VIETNAMESE, "Đà Lạt|hoa|mưa") and r.calls,
    ),
    "create-list": (
        "Make a file todo.txt with one line: water the plants",
        lambda r: r.text("todo.txt").strip() == "water the plants",
    ),
    "edit-theme": (
        "Change the theme in settings.json from light to dark.",
        lambda r: r.text("settings.json") == MORE_FILES["settings.json"].replace("light", "dark"),
    ),
    "run-script": (
        "Run sh check.sh and tell me what it prints.",
        lambda r: r.used("Bash") and r.says("all good"),
    ),
    "product": ("What is 7 times 6?", lambda r: r.says(r"\b42\b|forty-two") and not r.used("Write", "Edit")),
    "thanks": ("Thank you, good morning!", lambda r: len(r.answer.strip()) > 0 and not r.used("Bash", "Write", "Edit")),
    "list-source": ("List the files in the src folder.", lambda r: r.says(r"main\.rs", r"config\.rs")),
    "count-markdown": ("How many .md files are in the folder docs?", lambda r: r.says(r"\b(2|two)\b")),
    "find-word": ("Which file mentions the word plumber?", lambda r: r.says(r"notes\.txt")),
    "read-host": ("Look at config.ini. Which host is set there?", lambda r: r.says("localhost")),
    "write-version": (
        "Write the text 1.2.3 into a new file build/version.txt.",
        lambda r: r.text("build/version.txt").strip() == "1.2.3",
    ),
    "append-contact": (
        "Append the line 'Tuan: 0900 777 888' to contacts.txt.",
        lambda r: r.text("contacts.txt").rstrip("\n") == MORE_FILES["contacts.txt"] + "Tuan: 0900 777 888",
    ),
    "shell-length": ("Use the shell: printf hippopotamus | wc -c. Which number comes out?", lambda r: r.says(r"\b12\b")),
    "rename-function": (
        "In lib/shapes.py rename the function square_area to area_of_square.",
        lambda r: r.text("lib/shapes.py") == MORE_FILES["lib/shapes.py"].replace("square_area", "area_of_square"),
    ),
    "planet": ("Which planet is closest to the sun?", lambda r: r.says("Mercury")),
    "phone-vietnamese": ("Số điện thoại của Minh trong tệp contacts.txt là gì?", lambda r: r.says("0912 ?333 ?444")),
    "error-message": ("Run python3 broken.py. Which error does it raise?", lambda r: r.says("ValueError|no such horse")),
}

SETS = {"tasks": (TASKS, FILES), "held-out": (HELD_OUT, MORE_FILES)}

VARIANTS = {"full": [], "no-rescue": ["--no-rescue"], "no-guard": ["--no-guard"]}


class Runner:
    """One process that runs task after task."""

    def __init__(self, args, flags):
        command = [args.runner, "--model", args.model, "--temperature", str(args.temperature), *flags, *args.flag]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, task, files, seed):
        prompt, judge = task
        with tempfile.TemporaryDirectory() as scratch:
            folder = pathlib.Path(scratch) / "work"
            for name, text in files.items():
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            print(json.dumps({"task": prompt, "cwd": str(folder), "seed": seed}), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
            if not line:
                sys.exit(f"the runner ended with {self.process.wait()}")
            result = json.loads(line)
            return bool(judge(Run(folder, result))), result

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--runner", required=True)
    p.add_argument("--model", default="qwen2.5-coder-1.5b-instruct-q4_k_m")
    p.add_argument("--set", default="tasks", choices=SETS)
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument("--temperature", type=float, default=0.7)
    p.add_argument("--variants", default="full,no-rescue,no-guard")
    p.add_argument("--only")
    p.add_argument("--json", help="gets one line a run")
    p.add_argument("--flag", action="append", default=[], help="a further flag of the runner, as --flag=--no-guard")
    p.add_argument("--verbose", action="store_true", help="print the calls and answers of failed runs")
    args = p.parse_args()
    tasks, files = SETS[args.set]
    names = args.only.split(",") if args.only else list(tasks)
    unknown = [name for name in names if name not in tasks]
    if unknown:
        p.error(f"--only: no task {', '.join(unknown)} in {args.set}; there are {', '.join(tasks)}")
    log = open(args.json, "w", encoding="utf-8") if args.json else None
    for variant in args.variants.split(","):
        runner = Runner(args, VARIANTS[variant])
        right = total = 0
        ends = collections.Counter()
        for name in names:
            marks = ""
            for seed in range(1, args.seeds + 1):
                ok, result = runner.run(tasks[name], files, seed)
                marks += "+" if ok else "-"
                right, total = right + ok, total + 1
                ends[result["stop_reason"]] += 1
                if log:
                    row = {"variant": variant, "task": name, "seed": seed, "right": ok, "result": result}
                    print(json.dumps(row, ensure_ascii=False), file=log, flush=True)
                if args.verbose and not ok:
                    calls = [(c["name"], c["arguments"], c["outcome"]) for c in result["tool_calls"]]
                    print(f"    {name} seed {seed}: {result['stop_reason']}; {calls}; {result['answer']!r} {result['error'] or ''}")
            print(f"{variant:10} {name:20} {marks}", flush=True)
        runner.close()
        ended = ", ".join(f"{reason} {count}" for reason, count in ends.most_common())
        print(f"{args.model}, {args.set}, {variant}: {right} of {total} right ({100 * right / total:.0f}%); ended by: {ended}", flush=True)


main()
