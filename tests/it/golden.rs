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

/// What a step should give: the ten likeliest ids with their log-probabilities, the likeliest first.
type Step = Vec<(u32, f64)>;

struct Golden {
    /// Of each case the ids before the first step, and those of the steps.
    cases: Vec<(Vec<u32>, Vec<u32>)>,
    steps: Vec<Step>,
}

impl Golden {
    fn parse(text: &str) -> Golden {
        let golden: serde_json::Value = serde_json::from_str(text).unwrap();
        let id = |v: &serde_json::Value| v.as_u64().unwrap() as u32;
        let (mut cases, mut steps) = (Vec::new(), Vec::new());
        for case in golden["cases"].as_array().unwrap() {
            let mut ids: Vec<u32> = case["prompt_ids"].as_array().unwrap().iter().map(id).collect();
            let first = ids.len() - 1;
            for step in case["greedy"].as_array().unwrap() {
                ids.push(id(&step["id"]));
                let top: Step =
                    step["top"].as_array().unwrap().iter().map(|t| (id(&t[0]), t[1].as_f64().unwrap())).collect();
                assert_eq!(top[0].0, id(&step["id"]));
                steps.push(top);
            }
            // The last id is what the last step gives; nothing is asked after it.
            ids.pop();
            let rest = ids.split_off(first);
            cases.push((ids, rest));
        }
        Golden { cases, steps }
    }

    /// The log-probabilities at every step, teacher-forced along the golden ids.
    fn run(&self, path: &std::path::Path, backend: Backend, kv: KvType) -> Vec<Vec<f64>> {
        let mut model = Model::open(path, backend, kv).unwrap();
        let vocab = model.config().vocab;
        let mut rows = Vec::new();
        for (prompt, rest) in &self.cases {
            let mut kv = model.new_kv();
            model.forward(&mut kv, prompt, Logits::None, &|| false).unwrap();
            let all = model.forward(&mut kv, rest, Logits::All, &|| false).unwrap();
            rows.extend(all.chunks_exact(vocab).map(log_softmax));
        }
        rows
    }
}

/// The ten likeliest of each row.
fn steps(rows: &[Vec<f64>]) -> Vec<Step> {
    let top = |row: &Vec<f64>| {
        let mut ids: Vec<u32> = (0..row.len() as u32).collect();
        ids.select_nth_unstable_by(10, |&a, &b| row[b as usize].total_cmp(&row[a as usize]));
        ids.truncate(10);
        ids.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]));
        ids.into_iter().map(|id| (id, row[id as usize])).collect()
    };
    rows.iter().map(top).collect()
}

/// `bound`: of the mean difference.
fn check(what: &str, rows: &[Vec<f64>], expected: &[Step], bound: f64) {
    assert_eq!(rows.len(), expected.len());
    assert!(rows.len() > 180);
    let best = |row: &[f64]| (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap() as u32;
    let agree = rows.iter().zip(expected).filter(|(row, step)| best(row) == step[0].0).count();
    let diffs =
        rows.iter().zip(expected).flat_map(|(row, step)| step.iter().map(|&(id, p)| (row[id as usize] - p).abs()));
    let count = expected.iter().map(Vec::len).sum::<usize>();
    let (top1, mean) = (agree as f64 / rows.len() as f64, diffs.sum::<f64>() / count as f64);
    println!("{what}: {} steps, top-1 {top1:.4}, mean |Δ log p| {mean:.4}", rows.len());
    assert!(top1 >= 0.97, "{what}: top-1 agreement {top1}");
    assert!(mean <= bound, "{what}: mean |Δ log p| {mean}");
}

/// Against llama.cpp's values, and against an f32 pass over the dequantised file that takes no shortcut.
fn check_file(id: &str, golden: &str, kv_types: &[KvType]) {
    let Some(path) = model_file(id) else { return };
    let golden = Golden::parse(golden);
    let exact = Backend::Candle { device: candle_core::Device::Cpu, exact: true };
    let exact = golden.run(&path, exact, KvType::F32);
    check(&format!("{id}, exact f32, against llama.cpp"), &exact, &golden.steps, 0.08);
    let exact = steps(&exact);
    for &kv in kv_types {
        let ours = golden.run(&path, Backend::cpu(), kv);
        // Keys and values of 8 bits add to the rounding of the activations.
        let bound = if kv == KvType::Q8_0 { 0.09 } else { 0.08 };
        check(&format!("{id}, {kv:?} KV, against llama.cpp"), &ours, &golden.steps, bound);
        check(&format!("{id}, {kv:?} KV, against exact f32"), &ours, &exact, bound);
    }
}

#[test]
fn the_half_billion_file_agrees_with_llama_cpp_and_with_exact_f32() {
    check_file(CODER_05B, include_str!("../data/greedy_logprobs.json"), &[KvType::F16, KvType::F32, KvType::Q8_0]);
}

#[test]
fn the_default_file_agrees_with_llama_cpp_and_with_exact_f32() {
    check_file(CODER_15B, include_str!("../data/greedy_logprobs_1.5b.json"), &[KvType::F16, KvType::Q8_0]);
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
