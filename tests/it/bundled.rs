//! The built-in tokenizer and template against Qwen2.5's own ids, with no model on the machine.

use cob::chat::bundled;
use cob::chat::qwen::ChatFormat;
use serde_json::Value;

use crate::chat::with_controls;
use crate::real::model_file;

#[test]
fn it_gives_the_ids_of_qwens_own_tokenizer() {
    let template = bundled::template().unwrap();
    let cases: Vec<Value> = serde_json::from_str(include_str!("../data/tokenize.json")).unwrap();
    assert!(cases.len() > 60);
    for case in cases {
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        let text = case["text"].as_str().unwrap();
        assert_eq!(with_controls(template.tokenizer(), text), ids, "{text:?}");
    }
}

#[test]
fn it_is_that_of_the_model_file() {
    let Some(path) = model_file("qwen2.5-coder-0.5b-instruct-q4_k_m") else { return };
    let (ours, theirs) = (bundled::template().unwrap(), ChatFormat::open(&path, None).unwrap().template);
    assert_eq!(ours.source(), theirs.source());
    let (ours, theirs) = (ours.tokenizer(), theirs.tokenizer());
    assert_eq!((ours.vocab_size(), ours.controls()), (theirs.vocab_size(), theirs.controls()));
    let differs = |id: &u32| ours.token_bytes(*id) != theirs.token_bytes(*id);
    assert_eq!((0..ours.vocab_size() as u32).find(differs), None);
}
