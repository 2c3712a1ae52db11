//! The forward pass against the golden log-probabilities of llama.cpp (`tests/data/README.md`).

use cob::model::{Backend, Error, KvType, Logits, Model};

use crate::real::model_file;

const CODER_05B: &str = "qwen2.5-coder-0.5b-instruct-q4_k_m";
const CODER_15B: &str = "qwen2.5-coder-1.5b-instruct-q4_k_m";

/// `log softmax` of one row.
fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let largest = logits.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b)) as f64;
    let sum: f64 = logits.iter().map(|&x| (x as f64 - largest).exp()).sum();
    logits.iter().map(|&x| x as f64 - largest - sum.ln()).collect()
}

struct Agreement {
    steps: usize,
    top1: f64,
    mean_abs_diff: f64,
}

/// Teacher-forced along the golden ids: `forward(prompt, rest)` gives the logits of every position of `rest`.
fn compare(golden: &str, mut forward: impl FnMut(&[u32], &[u32]) -> Vec<Vec<f32>>) -> Agreement {
    let golden: serde_json::Value = serde_json::from_str(golden).unwrap();
    let (mut steps, mut agree, mut diffs, mut count) = (0, 0, 0.0, 0);
    for case in golden["cases"].as_array().unwrap() {
        let id = |v: &serde_json::Value| v.as_u64().unwrap() as u32;
        let mut ids: Vec<u32> = case["prompt_ids"].as_array().unwrap().iter().map(id).collect();
        let greedy = case["greedy"].as_array().unwrap();
        let first = ids.len() - 1;
        ids.extend(greedy.iter().map(|step| id(&step["id"])));
        let rows = forward(&ids[..first], &ids[first..]);
        for (step, row) in greedy.iter().zip(&rows) {
            let ours = log_softmax(row);
            let best = (0..ours.len()).max_by(|&a, &b| ours[a].total_cmp(&ours[b])).unwrap();
            steps += 1;
            agree += (best as u32 == id(&step["id"])) as usize;
            for top in step["top"].as_array().unwrap() {
                diffs += (ours[id(&top[0]) as usize] - top[1].as_f64().unwrap()).abs();
                count += 1;
            }
        }
    }
    Agreement { steps, top1: agree as f64 / steps as f64, mean_abs_diff: diffs / count as f64 }
}

fn check(id: &str, golden: &str, kv: KvType) {
    let Some(path) = model_file(id) else { return };
    let mut model = Model::open(&path, Backend::cpu(), kv).unwrap();
    let agreement = compare(golden, |prompt, rest| {
        let mut kv = model.new_kv();
        let vocab = model.config().vocab;
        model.forward(&mut kv, prompt, Logits::None, &|| false).unwrap();
        let all = model.forward(&mut kv, rest, Logits::All, &|| false).unwrap();
        all.chunks_exact(vocab).map(<[f32]>::to_vec).collect()
    });
    let Agreement { steps, top1, mean_abs_diff } = agreement;
    println!("{id}, {kv:?} KV: {steps} steps, top-1 {top1:.4}, mean |Δ log p| {mean_abs_diff:.4}");
    assert!(steps > 180);
    assert!(top1 >= 0.97, "top-1 agreement {top1}");
    assert!(mean_abs_diff <= 0.08, "mean |Δ log p| {mean_abs_diff}");
}

#[test]
fn the_half_billion_file_agrees_with_llama_cpp() {
    check(CODER_05B, include_str!("../data/greedy_logprobs.json"), KvType::F16);
    check(CODER_05B, include_str!("../data/greedy_logprobs.json"), KvType::F32);
}

#[test]
fn the_default_file_agrees_with_llama_cpp() {
    check(CODER_15B, include_str!("../data/greedy_logprobs_1.5b.json"), KvType::F16);
}

#[test]
fn a_cancelled_pass_leaves_the_kv_as_it_was() {
    let Some(path) = model_file(CODER_05B) else { return };
    let mut model = Model::open(&path, Backend::cpu(), KvType::F16).unwrap();
    let mut kv = model.new_kv();
    let before = model.forward(&mut kv, &[1, 2, 3], Logits::Last, &|| false).unwrap();
    let calls = std::cell::Cell::new(0);
    let cancelled = || calls.replace(calls.get() + 1) == 5;
    assert!(matches!(model.forward(&mut kv, &[4, 5], Logits::Last, &cancelled), Err(Error::Cancelled)));
    assert_eq!(kv.len(), 3);
    kv.truncate(2);
    assert_eq!(model.forward(&mut kv, &[3], Logits::Last, &|| false).unwrap(), before);
}
