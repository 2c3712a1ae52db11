"""Kills `cob run` with SIGKILL after every kind of event and inside a tool, on the real model, and resumes. See scripts/kill9.sh.

A kill after an event is a kill before the one that follows it. What must hold after each: the session resumes to an end of its own,
each call has at most one start and exactly one result in the log, and a command that appends a line to a file left at most one
line for each of its starts.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

APPEND = "Run this shell command: sleep 1; echo ran >> log.txt; sleep 1"
LONG = "Run this shell command: echo ran >> log.txt; seq 1 30000"

# What is killed: (name, task, flags, the event after which it is killed, seconds later, flags of the resumed run, kill the resumed run after).
CASES = [
    ("after init", APPEND, [], "init", 0, [], None),
    ("after user", APPEND, [], "user", 0, [], None),
    ("in the prefill", APPEND, [], "user", 1.0, [], None),
    ("after assistant", APPEND, [], "assistant", 0, [], None),
    ("after tool_started", APPEND, [], "tool_started", 0, [], None),
    ("in the tool, before it appends", APPEND, [], "tool_started", 0.5, [], None),
    ("in the tool, after it appended", APPEND, [], "tool_started", 1.5, [], None),
    ("after tool_result", APPEND, [], "tool_result", 0, [], None),
    ("in the reply after it", APPEND, [], "tool_result", 0.3, [], None),
    ("after note", LONG, [], "note", 0, [], None),
    ("after refused", APPEND, ["--refuse"], "refused", 0, [], None),
    ("after repeat_guarded", "Read notes.txt.", ["--tool-choice", "Read", "--reminder", "on-repeat", "--routing", "false"], "repeat_guarded", 0, [], None),
    ("after stopped", APPEND, [], "stopped", 0, ["Thanks."], None),
    ("after resumed", APPEND, [], "assistant", 0, [], "resumed"),
    ("after model_changed", APPEND, [], "assistant", 0, ["--model", "OTHER"], "model_changed"),
    ("twice inside tools", APPEND, [], "tool_started", 0.5, [], "assistant"),
]


def events(path):
    """The events of a log, the torn last line left out."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line]


def log_of(state):
    return next(iter((state / "cob" / "sessions").glob("*.jsonl")), state / "none")


def run(args, folder, state, words, kill_after=None, delay=0.0):
    """Runs cob; with `kill_after` until a further event of that kind is in the log. Returns the exit code and the result."""
    command = [args.cob, "run", *words, "--output-format", "json", "--quiet", "--offline", "--cwd", str(folder)]
    env = dict(os.environ, XDG_STATE_HOME=str(state))
    before = len(events(log_of(state)))
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True)
    if kill_after:
        while process.poll() is None:
            if any(event["type"] == kill_after for event in events(log_of(state))[before:]):
                time.sleep(delay)
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.002)
    out, err = process.communicate()
    result = json.loads(out) if out.strip() else None
    return process.returncode, result, err


def check(args, name, task, flags, kind, delay, resume, second):
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        folder, state = scratch / "work", scratch / "state"
        folder.mkdir()
        (folder / "notes.txt").write_text("one\ntwo\n")
        refuse = "--refuse" in flags
        flags = [flag for flag in flags if flag != "--refuse"]
        allow = [] if refuse else ["--allow", "Bash"]
        choice = [] if "--tool-choice" in flags else ["--tool-choice", "Bash"]
        code, _, err = run(args, folder, state, [task, "--model", args.model, *allow, *choice, *flags], kind, delay)
        seen = any(event["type"] == kind for event in events(log_of(state)))
        if not seen:
            return f"no event `{kind}` came (exit {code}): {err[-200:]}"
        killed = code == -signal.SIGKILL or kind == "stopped"
        if not killed:
            return f"it had ended before the kill (exit {code})"
        session = log_of(state).stem
        resume = [args.other if flag == "OTHER" else flag for flag in resume]
        model = [] if "--model" in resume else ["--model", args.model]
        words = ["--resume", session, *model, *allow, *resume]
        if second:
            code, _, err = run(args, folder, state, words, second, 0.0)
            if code != -signal.SIGKILL:
                return f"the resumed run was not killed after `{second}` (exit {code}): {err[-200:]}"
        code, result, err = run(args, folder, state, words)
        if code not in (0, 3) or not result:
            return f"it did not resume (exit {code}): {err[-300:]}"
        # The command may still be ending its sleep.
        time.sleep(1.2)
        log = events(log_of(state))
        calls = [call["id"] for event in log if event["type"] == "assistant" for call in event["message"].get("calls", [])]
        starts = [event["call_id"] for event in log if event["type"] == "tool_started"]
        results = [event["call_id"] for event in log if event["type"] == "tool_result"]
        lines = (folder / "log.txt").read_text().count("\n") if (folder / "log.txt").exists() else 0
        if len(set(starts)) != len(starts):
            return f"a call was started twice: {starts}"
        if sorted(results) != sorted(calls):
            return f"calls {calls}, results {results}"
        if lines > len(starts):
            return f"{lines} lines were appended by {len(starts)} starts"
        print(f"ok    {name}: killed, resumed to `{result['stop_reason']}`; {len(calls)} calls, {len(starts)} started, {lines} lines", flush=True)
        return None


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cob", required=True)
    p.add_argument("--model", default="qwen2.5-coder-0.5b-instruct-q4_k_m")
    p.add_argument("--other", default="qwen2.5-coder-1.5b-instruct-q4_k_m", help="the model that a session is resumed with")
    p.add_argument("--only", help="cases whose name contains this")
    args = p.parse_args()
    args.cob = os.path.abspath(args.cob)
    faults = 0
    cases = [case for case in CASES if not args.only or args.only in case[0]]
    for case in cases:
        fault = check(args, *case)
        if fault:
            faults += 1
            print(f"FAULT {case[0]}: {fault}", flush=True)
    print(f"{len(cases)} cases, {faults} faults")
    sys.exit(1 if faults else 0)


main()
