//! Grammars and masks, driven as the engine drives them.

use cob::chat::Delta;
use cob::chat::mask::{CallMask, Parsed, parse};
use cob::engine::{Mask, Verdict};
use cob::message::ToolChoice;

use super::*;

/// What a completion came to.
#[derive(Debug, Default)]
struct Outcome {
    ids: Vec<u32>,
    parsed: Parsed,
    streamed: String,
    started: Vec<(String, bool)>,
    rewinds: usize,
    forced: usize,
    /// The model ended its turn, or the mask did.
    ended: bool,
}

/// The engine's loop without an engine: `model` writes the logits for the ids so far; the highest wins.
fn drive(kit: &Kit, mut mask: CallMask, limit: usize, mut model: impl FnMut(&[u32], &mut [f32])) -> Outcome {
    let mut view = mask.view();
    let routed = mask.is_routed();
    let mut out = Outcome::default();
    let mut deltas = Vec::new();
    let mut logits = vec![0f32; kit.vocab];
    let stops = kit.grammars.stop_ids();
    'all: while out.ids.len() < limit {
        let mut tokens = mask.forced();
        let forced = !tokens.is_empty();
        if !forced {
            logits.fill(0.0);
            model(&out.ids, &mut logits);
            let before = logits.clone();
            mask.allow(&mut logits).unwrap();
            for (now, before) in logits.iter().zip(&before) {
                assert!(now == before || *now == f32::NEG_INFINITY, "an allowed logit was changed");
            }
            let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
            if stops.contains(&(best as u32)) {
                out.ended = true;
                break;
            }
            tokens = vec![best as u32];
        }
        for token in tokens {
            out.ids.push(token);
            out.forced += usize::from(forced);
            view.token(token, |d| deltas.push(d));
            match mask.accept(token).unwrap() {
                Verdict::Continue => {}
                Verdict::Stop => {
                    out.ended = true;
                    break 'all;
                }
                Verdict::Rewind { keep } => {
                    assert!(keep < out.ids.len());
                    out.rewinds += 1;
                    out.ids.truncate(keep);
                    view.rewind(keep);
                    break;
                }
            }
        }
    }
    let (ids, parsed) = view.finish(|d| deltas.push(d));
    assert_eq!(ids, out.ids);
    let mut plain = parsed.clone();
    plain.calls.iter_mut().for_each(|call| call.rescued = false);
    assert_eq!(parse(&kit.grammars, &ids, routed), plain);
    for delta in deltas {
        match delta {
            Delta::Text(text) => out.streamed.push_str(&text),
            Delta::CallStarted { name, rescued } => out.started.push((name, rescued)),
            Delta::Prefill { .. } => unreachable!(),
        }
    }
    assert_eq!(out.streamed.trim_end(), parsed.text.trim_end(), "what was streamed does not stand");
    out.parsed = parsed;
    out
}

/// A model that wants to write one of `texts`: the first that begins with what stands already; then it ends its turn.
fn writer<'a>(kit: &'a Kit, texts: &'a [&'a str]) -> impl FnMut(&[u32], &mut [f32]) + 'a {
    move |ids, logits| {
        let so_far = kit.tokenizer.decode(ids);
        let rest = texts.iter().find_map(|text| text.as_bytes().strip_prefix(&so_far[..]));
        logits[kit.tokenizer.control("<|im_end|>").unwrap() as usize] = 1.0;
        let Some(rest) = rest.filter(|r| !r.is_empty()) else { return };
        // What a real model's logits also do: shorter beginnings of the same text come after the longest.
        // Logits of a real model look like this too: a shorter beginning of the same text comes after the longest.
        logits[next_token(kit, rest) as usize] = 9.0;
        let byte = single_byte(kit, rest[0]) as usize;
        logits[byte] = logits[byte].max(5.0);
    }
}

fn single_byte(kit: &Kit, byte: u8) -> u32 {
    (0..512).find(|&id| kit.tokenizer.token_bytes(id) == [byte]).unwrap()
}

/// The first token of `rest`, which can be a control token, or a byte where a character was begun by other tokens.
fn next_token(kit: &Kit, rest: &[u8]) -> u32 {
    let Ok(text) = std::str::from_utf8(rest) else { return single_byte(kit, rest[0]) };
    if let Some((_, id)) = kit.tokenizer.controls().iter().find(|(name, _)| text.starts_with(name.as_str())) {
        return *id;
    }
    let end = kit.tokenizer.controls().iter().filter_map(|(name, _)| text.find(name.as_str())).min();
    kit.tokenizer.encode_exact(&text[..end.unwrap_or(text.len())])[0]
}

fn tool(name: &str, parameters: Value) -> ToolSpec {
    ToolSpec { name: name.into(), description: format!("Does {name}."), parameters }
}

fn search() -> ToolSpec {
    tool(
        "search_blog",
        json!({"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}, "required": ["query"], "additionalProperties": false}),
    )
}

fn tools() -> Vec<ToolSpec> {
    vec![
        search(),
        tool("search", json!({"type": "object", "properties": {}})),
        tool(
            "mcp.weather-now",
            json!({"type": "object", "properties": {"city": {"enum": ["Hà Nội", "Huế"]}}, "required": ["city"]}),
        ),
        tool("tìm_kiếm", json!({"type": "object", "properties": {"từ": {"type": "string"}}, "required": ["từ"]})),
    ]
}

fn mask(kit: &Kit, tools: &[ToolSpec], choice: ToolChoice, rescue: bool) -> CallMask {
    CallMask::new(kit.grammars.clone(), kit.grammars.compile(tools), choice, rescue).unwrap()
}

fn kits() -> impl Iterator<Item = &'static Kit> {
    std::iter::once(tiny()).chain(real())
}

const CALL: &str = "<tool_call>\n{\"name\": \"search_blog\", \"arguments\": {\"query\": \"mưa\"}}\n</tool_call>";

#[test]
fn text_and_calls_in_auto() {
    for kit in kits() {
        let run = |text: &str| drive(kit, mask(kit, &tools(), ToolChoice::Auto, true), 400, writer(kit, &[text]));
        let out = run("Chào bạn 🙂.\n\nXong.\n");
        assert_eq!((out.streamed.as_str(), out.parsed.calls.len()), ("Chào bạn 🙂.\n\nXong.\n", 0));
        assert!(out.ended && out.rewinds == 0);

        let out = run(CALL);
        assert_eq!(
            out.parsed.calls,
            [ToolCall {
                id: String::new(),
                name: "search_blog".into(),
                arguments: json!({"query": "mưa"}),
                rescued: false
            }]
        );
        assert_eq!(out.started, [("search_blog".to_owned(), false)]);
        assert_eq!(String::from_utf8(kit.tokenizer.decode(&out.ids)).unwrap(), CALL);
        assert!(out.ended && out.forced > 0 && out.streamed.is_empty());

        // Text, then two calls; then nothing more, though the model would like to.
        let two = format!(
            "Tôi sẽ tìm.\n{CALL}\n<tool_call>\n{{\"name\": \"mcp.weather-now\", \"arguments\": {{\"city\": \"Huế\"}}}}\n</tool_call> and"
        );
        let out = run(&two);
        assert_eq!(out.parsed.text, "Tôi sẽ tìm.");
        assert_eq!(out.parsed.calls.len(), 2);
        assert_eq!(out.parsed.calls[1].arguments, json!({"city": "Huế"}));
        assert!(out.ended && !out.parsed.cut_call);

        // The same call again and again: twice is enough.
        let out = run(&[CALL; 9].join("\n"));
        assert_eq!(out.parsed.calls.len(), 2);
        assert!(out.ended);

        // What the schema does not know cannot be written.
        let out = run(&CALL.replace("\"query\": \"mưa\"", "\"limit\": 3.5, \"x\": 1"));
        assert_eq!(out.parsed.calls.len() + usize::from(out.parsed.cut_call), 1);

        // A call that a limit cuts is none.
        let out = drive(kit, mask(kit, &tools(), ToolChoice::Auto, true), 12, writer(kit, &[CALL]));
        assert!(!out.ended && out.parsed.cut_call && out.parsed.calls.is_empty() && out.parsed.text.is_empty());
    }
}

#[test]
fn the_other_choices() {
    for kit in kits() {
        let want =
            |choice: ToolChoice, text: &str| drive(kit, mask(kit, &tools(), choice, true), 400, writer(kit, &[text]));
        let out = want(ToolChoice::Required, CALL);
        assert_eq!(out.parsed.calls[0].arguments, json!({"query": "mưa"}));
        assert_eq!(out.ids[0], kit.tokenizer.control("<tool_call>").unwrap());
        let other = "<tool_call>\n{\"name\": \"tìm_kiếm\", \"arguments\": {\"từ\": \"x\"}}\n</tool_call>";
        let out = want(ToolChoice::Named("tìm_kiếm".into()), &format!("{other}\n{CALL}"));
        assert_eq!(out.parsed.calls.len(), 1, "exactly one");
        assert_eq!(
            (out.parsed.calls[0].name.as_str(), &out.parsed.calls[0].arguments),
            ("tìm_kiếm", &json!({"từ": "x"}))
        );
        // The whole beginning is one batch.
        let mut named = mask(kit, &tools(), ToolChoice::Named("search_blog".into()), true);
        let head = String::from_utf8(kit.tokenizer.decode(&named.forced())).unwrap();
        assert!(head.starts_with("<tool_call>\n{\"name\": \"search_blog\", \"arguments\": {\"query\":"), "{head}");
        assert!(named.structured());

        let out = want(ToolChoice::None, CALL);
        assert!(out.parsed.calls.is_empty() && out.ended, "{out:?}");
        let err = |choice, tools: &[ToolSpec]| {
            CallMask::new(kit.grammars.clone(), kit.grammars.compile(tools), choice, true).err().unwrap_or_default()
        };
        assert!(
            err(ToolChoice::Named("nope".into()), &tools()).contains("`nope` is not offered; offered are: search_blog")
        );
        assert!(err(ToolChoice::Required, &[]).contains("no tool"));
        let remote =
            [tool("far", json!({"type": "object", "properties": {"a": {"$ref": "https://example.com/a.json"}}}))];
        assert!(err(ToolChoice::Named("far".into()), &remote).contains("outside of itself"));
    }
}

/// Without tools, or without a right to call, no control token can be written but those that end the turn.
#[test]
fn text_holds_no_control_tokens() {
    for kit in kits() {
        for (offered, choice) in [(vec![], ToolChoice::Auto), (tools(), ToolChoice::None)] {
            let mut mask = mask(kit, &offered, choice, true);
            let mut logits = vec![1f32; kit.vocab];
            mask.allow(&mut logits).unwrap();
            // An empty reply is none.
            assert!(kit.grammars.stop_ids().iter().all(|&id| logits[id as usize] == f32::NEG_INFINITY));
            mask.accept(kit.tokenizer.encode_exact("a")[0]).unwrap();
            let mut logits = vec![1f32; kit.vocab];
            mask.allow(&mut logits).unwrap();
            let allowed: Vec<u32> = (0..kit.vocab as u32).filter(|&i| logits[i as usize].is_finite()).collect();
            let controls: Vec<u32> = allowed.iter().copied().filter(|&id| is_control(&kit.tokenizer, id)).collect();
            let mut stops = kit.grammars.stop_ids();
            stops.sort();
            assert_eq!(controls, stops);
            assert_eq!(allowed.len(), kit.tokenizer.vocab_size() - kit.tokenizer.controls().len() + stops.len());
        }
        let mut nan = vec![f32::NAN; kit.vocab];
        assert!(mask(kit, &[], ToolChoice::Auto, true).allow(&mut nan).is_err());
    }
}

/// Foreign calls, as they come token by token, become real ones; the model goes on inside the grammar.
#[test]
fn foreign_calls_are_rescued() {
    let forms = [
        r#"{"name": "search_blog", "arguments": {"query": "x"}}"#,
        r#"{"name": "search_blog", "parameters": {"query": "x"}}"#,
        "{'name': 'search_blog', 'arguments': {'query': 'x'}}",
        "{\n    \"name\": \"search_blog\",\n    \"arguments\": {\n        \"query\": \"x\"\n    }\n}",
        "{\"arguments\": {\"query\": \"x\"}, \"name\": \"search_blog\"}",
        r#"{"type": "function", "function": {"name": "search_blog", "arguments": {}}}"#,
        r#"{"tool": "search_blog", "arguments": {"query": "x"}}"#,
        r#"[{"name": "search_blog", "arguments": {"query": "x"}}]"#,
        "```json\n{\"name\": \"search_blog\", \"arguments\": {\"query\": \"x\"}}\n```",
        "```\n{\"name\": \"search_blog\", \"arguments\": {\"query\": \"x\"}}\n```",
        "```tool_call\n{\"name\": \"search_blog\", \"arguments\": {\"query\": \"x\"}}\n```",
        "```python\nsearch_blog(query=\"x\")\n```",
        "<tools>\n{\"name\": \"search_blog\", \"arguments\": {\"query\": \"x\"}}\n</tools>",
        "<function_call>\n{\"name\": \"search_blog\", \"arguments\": {\"query\": \"x\"}}",
        "<|tool_call|>\n{\"name\": \"search_blog\", \"arguments\": {\"query\": \"x\"}}",
        "search_blog(query=\"x\")",
        "  \n\n{\"name\": \"search_blog\", \"arguments\": {}}",
    ];
    for kit in kits() {
        for lead in ["", "Tôi sẽ tìm giúp bạn.\n", "Let me look:\n\n"] {
            for form in forms {
                let foreign = format!("{lead}{form}");
                let native = format!("{lead}{CALL}");
                // White space between text and call stands; it is dropped only when there is no text.
                let spaced = format!("{lead}  \n\n{CALL}");
                let run = |rescue| {
                    let texts = [foreign.as_str(), &native, &spaced];
                    drive(kit, mask(kit, &tools(), ToolChoice::Auto, rescue), 400, writer(kit, &texts))
                };
                let out = run(true);
                assert_eq!(out.rewinds, 1, "{foreign:?}: {out:?}");
                assert!(out.ended);
                assert_eq!(out.started, [("search_blog".to_owned(), true)], "{foreign:?}");
                let [call] = &out.parsed.calls[..] else { panic!("{foreign:?}: {:?}", out.parsed) };
                assert!(call.rescued && call.name == "search_blog");
                assert_eq!(call.arguments, json!({"query": "mưa"}), "{foreign:?}");
                assert_eq!(out.parsed.text, lead.trim_end());
                let want = if form.starts_with(' ') && !lead.is_empty() { &spaced } else { &native };
                assert_eq!(&String::from_utf8(kit.tokenizer.decode(&out.ids)).unwrap(), want);
                let out = run(false);
                assert_eq!((out.rewinds, out.streamed.as_str()), (0, foreign.as_str()));
                assert!(out.parsed.calls.is_empty());
            }
        }
        // The model spells the tag from ordinary tokens.
        let spelled = |ids: &[u32], logits: &mut [f32]| {
            let text = kit.tokenizer.decode(ids);
            let at = text.len();
            let wish = b"<tool_call>\n{\"name\": \"search_blog\", \"arguments\": {\"query\": \"";
            let next = wish.get(at).copied().unwrap_or(b'}');
            let id = kit.tokenizer.encode_exact(&char::from(next).to_string())[0];
            logits[id as usize] = 9.0;
            logits[kit.tokenizer.encode_exact("\"")[0] as usize] = 1.0;
        };
        let out = drive(kit, mask(kit, &tools(), ToolChoice::Auto, true), 400, spelled);
        assert_eq!(out.started.first(), Some(&("search_blog".to_owned(), true)));
        assert_eq!(out.ids[0], kit.tokenizer.control("<tool_call>").unwrap());
    }
}

#[test]
fn answers_stay_answers_to_the_byte() {
    for kit in kits() {
        for text in [
            r#"{"name": "Alice", "age": 3}"#,
            r#"{"name": "search_blog", "posts": 3}"#,
            "```python\nfor x in y:\n    search_blog(x)\n```\nĐó là tất cả. 🙂",
            r#"Write `{"name": "search_blog", "arguments": {}}` to call it."#,
            "  \n\n",
            "search",
            "{\"name\": \"search_blog\", \"arg",
        ] {
            let out = drive(kit, mask(kit, &tools(), ToolChoice::Auto, true), 400, writer(kit, &[text]));
            assert_eq!((out.streamed.as_str(), out.rewinds), (text, 0));
            assert_eq!(out.parsed.text, text);
        }
    }
}

/// Where calls are forbidden, a foreign one is led away from: the text goes on differently.
#[test]
fn a_forbidden_call_is_led_away_from() {
    for kit in kits() {
        let foreign = "OK.\n{\"name\": \"search_blog\", \"arguments\": {}}";
        let fenced = "OK.\n```json\n{\"name\": \"search_blog\", \"arguments\": {}}\n```";
        let answer = "OK.\nĐáp án là 3.";
        let end = kit.tokenizer.control("<|im_end|>").unwrap() as usize;
        let model = |ids: &[u32], logits: &mut [f32]| {
            let so_far = kit.tokenizer.decode(ids);
            logits[end] = 1.0;
            for (text, score) in [(foreign, 9.0), (fenced, 8.0), (answer, 7.0)] {
                if let Some(rest) = text.as_bytes().strip_prefix(&so_far[..])
                    && !rest.is_empty()
                {
                    let id = next_token(kit, rest) as usize;
                    logits[id] = f32::max(logits[id], score);
                }
            }
        };
        let out = drive(kit, mask(kit, &tools(), ToolChoice::None, true), 400, model);
        assert!((1..=4).contains(&out.rewinds), "{out:?}");
        assert!(out.parsed.calls.is_empty() && out.ended);
        assert!(!out.streamed.contains("search_blog"), "{}", out.streamed);
        // A model that knows nothing else ends up with it as text, after a bounded number of tries.
        let stubborn = |ids: &[u32], logits: &mut [f32]| {
            let at = kit.tokenizer.decode(ids).iter().rev().take_while(|b| **b != b'\n').count();
            let line = b"search_blog(1)\n";
            logits[kit.tokenizer.encode_exact(&char::from(line[at % line.len()]).to_string())[0] as usize] = 9.0;
            logits[kit.tokenizer.encode_exact("\n")[0] as usize] = 5.0;
        };
        let out = drive(kit, mask(kit, &tools(), ToolChoice::None, true), 300, stubborn);
        assert!(out.rewinds <= 8, "{}", out.rewinds);
    }
}

#[test]
fn a_routing_line_decides_before_anything_is_written() {
    let check =
        |choice: ToolChoice, withheld: &[&str], wish: &[&str], text: &str, call: Option<&str>, rewinds: usize| {
            for kit in kits() {
                let withheld: Vec<String> = withheld.iter().map(|name| (*name).to_owned()).collect();
                let mask = mask(kit, &tools(), choice.clone(), true).withhold(&withheld).routing(true);
                let outcome = drive(kit, mask, 200, writer(kit, wish));
                assert_eq!(outcome.parsed.text, text, "{wish:?}");
                let name = outcome.parsed.calls.first().map(|call| call.name.as_str());
                assert_eq!(
                    (name, outcome.rewinds),
                    (call, rewinds),
                    "{wish:?}: {:?}",
                    String::from_utf8_lossy(&kit.tokenizer.decode(&outcome.ids))
                );
            }
        };
    let read =
        "Tool: search_blog\n<tool_call>\n{\"name\": \"search_blog\", \"arguments\": {\"query\": \"a\"}}\n</tool_call>";
    check(ToolChoice::Auto, &[], &[read], "", Some("search_blog"), 0);
    check(ToolChoice::Auto, &[], &["Answer: Paris."], "Paris.", None, 0);
    check(ToolChoice::Auto, &[], &["Answer:\n{\"a\": 1}"], "{\"a\": 1}", None, 0);
    // It answers and then calls all the same.
    let late = "Answer: {\"name\": \"search_blog\", \"arguments\": {\"query\": \"a\"}}";
    check(
        ToolChoice::Auto,
        &[],
        &[
            late,
            "Answer: \n<tool_call>\n{\"name\": \"search_blog\", \"arguments\": {\"query\": \"a\"}}\n</tool_call>",
            "Answer:\n<tool_call>\n{\"name\": \"search_blog\", \"arguments\": {\"query\": \"a\"}}\n</tool_call>",
        ],
        "",
        Some("search_blog"),
        1,
    );
    // Where calls are masked out, or all tools are withheld, only an answer is left.
    check(ToolChoice::None, &[], &["Answer: Paris."], "Paris.", None, 0);
    check(
        ToolChoice::Auto,
        &["search_blog", "search", "mcp.weather-now", "tìm_kiếm"],
        &["Answer: Paris."],
        "Paris.",
        None,
        0,
    );

    // A model that wants what is not offered, or is withheld, gets the nearest thing that its line can still become.
    for kit in kits() {
        for (withheld, wish) in [(vec![], "Tool: Rename\n"), (vec!["search_blog".to_owned()], "Tool: search_blog\n")] {
            let mask = mask(kit, &tools(), ToolChoice::Auto, true).withhold(&withheld).routing(true);
            let outcome = drive(kit, mask, 400, |ids, logits| {
                writer(kit, &[wish])(ids, logits);
                // To end a call that it did not want.
                logits[next_token(kit, b"\"") as usize] = 2.0;
                logits[next_token(kit, b"}") as usize] = 2.0;
            });
            // The line names another tool, and the call that it began is of that one.
            let output = String::from_utf8_lossy(&kit.tokenizer.decode(&outcome.ids)).into_owned();
            let mut offered = tools().into_iter().map(|tool| tool.name).filter(|name| !withheld.contains(name));
            assert!(
                offered.any(|name| {
                    output.starts_with(&format!("Tool: {name}\n<tool_call>\n{{\"name\": \"{name}\""))
                        && outcome.parsed.calls.iter().all(|call| call.name == name)
                }),
                "{wish} without {withheld:?}: {output}"
            );
            assert!(!outcome.parsed.text.contains("Tool:"), "{:?}", outcome.parsed);
        }
    }
}

#[test]
fn a_withheld_call_is_led_away_from_and_an_answer_is_never_blank() {
    for kit in kits() {
        // A foreign call of what is withheld, after the routing line, then white space, then words.
        let foreign = "Answer:\n\n{\"name\": \"search_blog\", \"arguments\": {}}";
        let withheld = ["search_blog".to_owned()];
        let mask = mask(kit, &tools(), ToolChoice::Auto, true).withhold(&withheld).routing(true);
        let mut longest = 0;
        let outcome = drive(kit, mask, 200, |ids, logits| {
            longest = longest.max(ids.len());
            // Once it has been led away it answers, after a blank of its own.
            let wish = if ids.len() < longest { "Answer: ế Paris" } else { foreign };
            let wish = if ids.len() < longest && ids.len() > 2 { "Answer: ế Paris" } else { wish };
            writer(kit, &[wish, "Answer: ế Paris", "Answer:\nế Paris"])(ids, logits);
        });
        assert!(outcome.rewinds >= 1 && outcome.parsed.calls.is_empty(), "{:?}", outcome.parsed);
        assert!(!outcome.parsed.text.trim().is_empty(), "{:?}", outcome.parsed);
    }
    // A model that would end its turn at once, or after a blank, says something.
    for (routing, wish) in [(true, "Answer:"), (true, "Answer:\n"), (false, "")] {
        for kit in kits() {
            let mask = mask(kit, &tools(), ToolChoice::None, true).prose(true).routing(routing);
            let outcome = drive(kit, mask, 20, writer(kit, &[wish]));
            let text = outcome.parsed.text.trim().to_owned();
            assert!(!text.is_empty() && !text.starts_with(['{', '<', '`']), "{wish:?}: {:?}", outcome.parsed);
        }
    }
}

#[test]
fn an_optional_argument_must_be_worth_it() {
    let properties = json!({"n": {"type": "integer"}, "of": {"type": "array"}, "deep": {"type": "boolean"}});
    let find = tool("find", json!({"type": "object", "properties": properties, "required": ["n", "of"]}));
    let wish =
        "<tool_call>\n{\"name\": \"find\", \"arguments\": {\"n\": 3, \"of\": [1, 2], \"deep\": true}}\n</tool_call>";
    let check = |margin: f32, expected: Value| {
        for kit in kits() {
            let mask = mask(kit, std::slice::from_ref(&find), ToolChoice::Auto, true).optional_margin(margin);
            let outcome = drive(kit, mask, 200, |ids, logits| {
                writer(kit, &[wish])(ids, logits);
                for end in [b"}".as_slice(), b"]}"] {
                    let logit = &mut logits[next_token(kit, end) as usize];
                    *logit = logit.max(4.5);
                }
            });
            assert_eq!(outcome.parsed.calls[0].arguments, expected, "margin {margin}");
        }
    };
    let all = json!({"n": 3, "of": [1, 2], "deep": true});
    // The writer wants the comma with 9.
    check(0.0, all.clone());
    check(4.4, all);
    // What is required comes all the same, and a comma inside a value is none between arguments.
    check(4.6, json!({"n": 3, "of": [1, 2]}));
}

#[test]
fn schemas_are_checked_one_by_one() {
    let kit = tiny();
    let object = |properties: Value| json!({"type": "object", "properties": properties});
    type Case<'a> = (&'a str, Value, Result<Vec<&'a str>, &'a str>);
    let cases: Vec<Case> = vec![
        ("plain", object(json!({"a": {"type": "string"}})), Ok(vec![])),
        ("empty", json!({}), Ok(vec![])),
        ("null", Value::Null, Ok(vec![])),
        ("any", object(json!({"a": {}, "b": true})), Ok(vec![])),
        (
            "unique",
            object(
                json!({"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": true}, "b": {"uniqueItems": true}}),
            ),
            Ok(vec!["`uniqueItems`"]),
        ),
        ("not", object(json!({"a": {"not": {"type": "string"}, "type": ["integer", "string"]}})), Ok(vec!["`not`"])),
        (
            "format",
            object(
                json!({"a": {"type": "string", "format": "uri-reference"}, "d": {"type": "string", "format": "date"}}),
            ),
            Ok(vec!["`format: uri-reference`"]),
        ),
        ("pattern", object(json!({"a": {"type": "string", "pattern": "^(?=x)y"}})), Ok(vec!["`pattern: ^(?=x)y`"])),
        (
            "iff",
            json!({"type": "object", "properties": {"a": {"type": "string"}}, "if": {}, "then": {}, "else": {}}),
            Ok(vec!["`if`", "`then`", "`else`"]),
        ),
        ("oneof", object(json!({"a": {"oneOf": [{"type": "number"}, {"type": "integer"}]}})), Ok(vec!["`oneOf`"])),
        (
            "ref",
            json!({"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}}),
            Ok(vec![]),
        ),
        (
            "both",
            json!({"type": "object", "properties": {"x_a": {"type": "string"}}, "patternProperties": {"^x_": {"type": "string"}}, "required": ["x_a"], "additionalProperties": false}),
            Ok(vec![]),
        ),
        ("draft3", object(json!({"a": {"type": "string", "required": true}})), Ok(vec!["`required (not a list)`"])),
        ("remote", object(json!({"a": {"$ref": "https://example.com/x.json"}})), Err("https://example.com/x.json")),
        ("dangling", object(json!({"a": {"$ref": "#/$defs/nothing"}})), Err("cannot be compiled")),
        (
            "itself",
            json!({"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"], "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}}}),
            Err("requires itself"),
        ),
        (
            "nothing",
            json!({"type": "object", "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 1}}, "required": ["a"]}),
            Err("nsatisfiable"),
        ),
        ("false", json!({"type": "object", "properties": {"a": false}, "required": ["a"]}), Err("nsatisfiable")),
        ("kind", json!({"type": "string"}), Err("must be an object")),
        ("list", json!([1]), Err("must be a JSON Schema")),
        ("unknown", object(json!({"a": {"type": "dict"}})), Err("dict")),
        (
            "vietnamese",
            object(
                json!({"a": {"type": "integer", "minimum": "một con số không phải là số, mà là một câu rất dài bằng tiếng Việt, để cắt giữa chữ ế ế ế ế"}}),
            ),
            Err("cannot be compiled"),
        ),
        ("", json!({}), Err("needs a name")),
        ("plain", json!({}), Err("already")),
    ];
    let specs: Vec<ToolSpec> = cases.iter().map(|(name, schema, _)| tool(name, schema.clone())).collect();
    let grammar = kit.grammars.compile(&specs);
    let mut good = Vec::new();
    let mut noted = 0;
    for (i, (name, _, want)) in cases.iter().enumerate() {
        match want {
            Ok(keywords) => {
                good.push(*name);
                let notes: Vec<&String> = grammar.notes().iter().filter(|n| n.contains(&format!("`{name}`"))).collect();
                assert_eq!(notes.len(), keywords.len(), "{name}: {notes:?}");
                noted += notes.len();
                assert!(keywords.iter().all(|k| notes.iter().any(|n| n.contains(k))), "{name}: {notes:?}");
            }
            Err(why) => {
                let refused = grammar.refused().iter().find(|r| r.name == *name && r.why.contains(why));
                assert!(refused.is_some(), "{i} {name}: {:?}", grammar.refused());
            }
        }
    }
    assert_eq!(grammar.names(), good);
    assert_eq!(grammar.notes().len(), noted);
    // The good ones live, all in one grammar, and the same list is not compiled again.
    kit.grammars.matcher(&grammar, &grammar.names().into_iter().map(str::to_owned).collect::<Vec<_>>()).unwrap();
    assert!(Arc::ptr_eq(&grammar, &kit.grammars.compile(&specs)));
    // Optional properties can be skipped, and what is not listed cannot be written.
    let call = "<tool_call>\n{\"name\": \"plain\", \"arguments\": {}}\n</tool_call>";
    let out = drive(kit, mask(kit, &specs, ToolChoice::Auto, true), 400, writer(kit, &[call]));
    assert_eq!(out.parsed.calls[0].arguments, json!({}));
}

/// 300 tools are one grammar.
#[test]
fn many_tools() {
    for kit in kits() {
        let many: Vec<ToolSpec> = (0..300).map(|i| ToolSpec { name: format!("tool_{i}"), ..search() }).collect();
        let call = CALL.replace("search_blog", "tool_299");
        let out = drive(kit, mask(kit, &many, ToolChoice::Auto, true), 400, writer(kit, &[&call]));
        assert_eq!(out.parsed.calls[0].name, "tool_299");
    }
}

// ---- whatever the logits say, a required call is a valid one ----

fn schema(depth: u32) -> BoxedStrategy<Value> {
    let leaf = prop_oneof![
        Just(json!({"type": "string"})),
        Just(json!({"type": "string", "minLength": 1, "maxLength": 8})),
        Just(json!({"type": "string", "pattern": "^[a-c]{1,3}-[0-9]+$"})),
        Just(json!({"type": "string", "format": "date"})),
        Just(json!({"type": "integer"})),
        Just(json!({"type": "integer", "minimum": -5, "maximum": 120})),
        Just(json!({"type": "number", "exclusiveMinimum": 0})),
        Just(json!({"type": "boolean"})),
        Just(json!({"enum": ["Hà Nội", "Huế", "thành phố Hồ Chí Minh", "東京"]})),
        Just(json!({"enum": ["a", 1, null, true]})),
        Just(json!({"const": "đúng"})),
        Just(json!({"type": "string", "format": "date-time"})),
        Just(json!({"type": "integer", "multipleOf": 5, "minimum": 10})),
        Just(json!({"type": "number", "minimum": -1.5, "maximum": 2.25})),
        Just(json!({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": false})),
        Just(json!({"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3})),
        Just(
            json!({"type": "object", "patternProperties": {"^x_": {"type": "boolean"}}, "additionalProperties": false})
        ),
        Just(json!({"allOf": [{"type": "integer"}, {"minimum": 3}]})),
        Just(json!({"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "integer"}]})),
        Just(json!({})),
        Just(json!({"type": ["string", "null"]})),
        Just(json!({"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}]})),
    ];
    if depth == 0 {
        return leaf.boxed();
    }
    prop_oneof![
        3 => leaf,
        1 => schema(depth - 1).prop_map(|items| json!({"type": "array", "items": items, "minItems": 1, "maxItems": 3})),
        2 => object(depth - 1),
    ]
    .boxed()
}

fn object(depth: u32) -> BoxedStrategy<Value> {
    let key =
        prop_oneof!["[a-z_]{1,8}", Just("thành phố".to_owned()), Just("a\"b\\c".to_owned()), Just("名前".to_owned())];
    proptest::collection::vec((key, schema(depth), proptest::bool::ANY), 0..4)
        .prop_map(|entries| {
            let required: Vec<&String> = entries.iter().filter(|(_, _, r)| *r).map(|(k, _, _)| k).collect();
            let required: std::collections::BTreeSet<&String> = required.into_iter().collect();
            let properties: serde_json::Map<String, Value> =
                entries.iter().map(|(k, s, _)| (k.clone(), s.clone())).collect();
            json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
        })
        .boxed()
}

#[test]
fn any_logits_make_a_valid_call() {
    let names = ["get", "get_all", "mcp__x.y-z", "tìm", "検索"];
    for (kit, cases) in [(Some(tiny()), 150), (real(), 40)] {
        let Some(kit) = kit else { continue };
        // Tokens that close something, and how much: a random model has to come to an end.
        let closing: Vec<f32> = (0..kit.vocab as u32)
            .map(|id| {
                let bytes = kit.tokenizer.token_bytes(id);
                if bytes.contains(&b'"') { 3.0 } else { f32::from(bytes.iter().any(|b| matches!(b, b'}' | b']'))) }
            })
            .collect();
        let strategy = (proptest::collection::vec(object(2), 1..names.len()), 1u64..u64::MAX);
        runner(cases)
            .run(&strategy, |(schemas, mut seed)| {
                let tools: Vec<ToolSpec> = schemas.iter().zip(names).map(|(s, name)| tool(name, s.clone())).collect();
                let grammar = kit.grammars.compile(&tools);
                prop_assert!(grammar.refused().is_empty(), "{:?}", grammar.refused());
                let mut random = move || {
                    seed ^= seed << 13;
                    seed ^= seed >> 7;
                    seed ^= seed << 17;
                    (seed >> 40) as f32 / (1u64 << 24) as f32
                };
                let model = |ids: &[u32], logits: &mut [f32]| {
                    let haste = ids.len() as f32 / 200.0;
                    for (logit, closing) in logits.iter_mut().zip(&closing) {
                        *logit = random() + haste * closing;
                    }
                };
                let mask = mask(kit, &tools, ToolChoice::Required, true);
                let out = drive(kit, mask, 3_000, model);
                prop_assert!(
                    out.ended && !out.parsed.calls.is_empty(),
                    "{:?}",
                    String::from_utf8_lossy(&kit.tokenizer.decode(&out.ids))
                );
                for call in &out.parsed.calls {
                    let tool = tools.iter().find(|t| t.name == call.name);
                    prop_assert!(tool.is_some(), "unknown name {:?}", &call.name);
                    let validator = jsonschema::validator_for(&tool.unwrap().parameters).unwrap();
                    let fault = validator.iter_errors(&call.arguments).next().map(|e| e.to_string());
                    prop_assert!(fault.is_none(), "{:?}: {}", fault, &call.arguments);
                }
                Ok(())
            })
            .unwrap();
    }
}
