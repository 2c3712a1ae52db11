//! The forward pass against candle's own models, and against itself: chunked, forked, rolled back, on other threads.

use candle_core::quantized::{GgmlDType, gguf_file};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use cob::chat::qwen::ChatFormat;
use cob::model::{Backend, Kv, KvType, Logits, Model, Part, Source, Tier};

use crate::tiny::{SMALL, Shape, write_gguf, write_gguf_with, write_safetensors};

const IDS: [u32; 40] = {
    let mut ids = [0; 40];
    let mut i = 0;
    while i < 40 {
        ids[i] = (i as u32 * 79 + 5) % 300;
        i += 1;
    }
    ids
};

fn exact() -> Backend {
    Backend::Candle { device: Device::Cpu, exact: true }
}

fn candle() -> Backend {
    Backend::Candle { device: Device::Cpu, exact: false }
}

fn cpu(threads: usize) -> Backend {
    Backend::Cpu { tier: Tier::detect(), threads }
}

/// The logits of every position, the ids being fed in chunks.
fn all_logits(model: &mut Model, kv: &mut Kv, ids: &[u32], chunks: &[usize]) -> Vec<f32> {
    let (mut at, mut out) = (0, Vec::new());
    for &n in chunks.iter().cycle() {
        if at == ids.len() {
            return out;
        }
        let end = ids.len().min(at + n);
        out.extend(model.forward(kv, &ids[at..end], Logits::All, &|| false).unwrap());
        at = end;
    }
    unreachable!()
}

fn run(path: &std::path::Path, backend: Backend, kv: KvType) -> Vec<f32> {
    let mut model = Model::open(path, backend, kv).unwrap();
    let mut kv = model.new_kv();
    all_logits(&mut model, &mut kv, &IDS, &[IDS.len()])
}

fn assert_close(what: &str, a: &[f32], b: &[f32], tolerance: f32) {
    assert_eq!(a.len(), b.len(), "{what}");
    let worst = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst <= tolerance, "{what}: the largest difference is {worst}");
}

/// The softmax of each row.
fn probabilities(logits: &[f32]) -> Vec<f32> {
    let row = |row: &[f32]| {
        let sum: f32 = row.iter().map(|x| x.exp()).sum();
        row.iter().map(|x| x.exp() / sum).collect::<Vec<_>>()
    };
    logits.chunks_exact(SMALL.vocab).flat_map(row).collect()
}

#[test]
fn f32_safetensors_agree_with_candle_transformers() {
    for (tied, seed) in [(false, 1), (true, 2)] {
        let folder = tempfile::tempdir().unwrap();
        let shape = Shape { tied, ..SMALL };
        write_safetensors(folder.path(), &shape, seed);
        let files: Vec<_> =
            (1..=2).map(|i| folder.path().join(format!("model-0000{i}-of-00002.safetensors"))).collect();
        let builder = unsafe { VarBuilder::from_mmaped_safetensors(&files, DType::F32, &Device::Cpu) }.unwrap();
        let config = std::fs::read_to_string(folder.path().join("config.json")).unwrap();
        let config: candle_transformers::models::qwen2::Config = serde_json::from_str(&config).unwrap();
        let mut theirs = candle_transformers::models::qwen2::ModelForCausalLM::new(&config, builder).unwrap();
        let mut expected: Vec<f32> = Vec::new();
        for i in 0..IDS.len() {
            let input = Tensor::new(&IDS[i..=i], &Device::Cpu).unwrap().unsqueeze(0).unwrap();
            expected.extend(theirs.forward(&input, i).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap());
        }
        for backend in [cpu(2), candle(), exact()] {
            let name = backend.name();
            assert_close(
                &format!("{name}, f32 KV"),
                &run(folder.path(), backend.clone(), KvType::F32),
                &expected,
                1e-3,
            );
            assert_close(&format!("{name}, f16 KV"), &run(folder.path(), backend, KvType::F16), &expected, 1e-2);
        }
    }
}

#[test]
fn a_folder_that_is_not_whole_is_refused_by_name() {
    let check = |tied: bool, change: &dyn Fn(&std::path::Path), expected: &[&str]| {
        let folder = tempfile::tempdir().unwrap();
        write_safetensors(folder.path(), &Shape { tied, ..SMALL }, 1);
        change(folder.path());
        let opened = Model::open(folder.path(), cpu(1), KvType::F16);
        let why = opened.map(|_| String::new()).unwrap_or_else(|why| why);
        assert!(expected.iter().all(|part| why.contains(part)), "{why:?}: {expected:?}");
        assert!(expected.is_empty() == why.is_empty() && why.lines().count() <= 1, "{why:?}");
        assert!(why.is_empty() || why.contains(folder.path().to_str().unwrap()), "{why:?}");
    };
    let configured = |folder: &std::path::Path, from: &str, to: &str| {
        let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
        assert!(config.contains(from), "{config}");
        std::fs::write(folder.join("config.json"), config.replace(from, to)).unwrap();
    };
    let second = "model-00002-of-00002.safetensors";
    check(true, &|_| {}, &[]);
    check(false, &|_| {}, &[]);
    let untied: &dyn Fn(&std::path::Path) = &|f| configured(f, r#""tie_word_embeddings":true"#, r#""x":0"#);
    check(true, untied, &["tensor lm_head.weight is missing", "tie_word_embeddings"]);
    let without_second = |folder: &std::path::Path| std::fs::remove_file(folder.join(second)).unwrap();
    check(
        false,
        &without_second,
        &["tensor model.layers.0.input_layernorm.weight is missing", "fetch the model again"],
    );
    let indexed = |folder: &std::path::Path| {
        without_second(folder);
        let index = format!(r#"{{"weight_map": {{"model.layers.0.input_layernorm.weight": "{second}"}}}}"#);
        std::fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
    };
    check(false, &indexed, &["tensor model.layers.0.input_layernorm.weight is missing", second, "fetch that file"]);
    let wider: &dyn Fn(&std::path::Path) =
        &|f| configured(f, r#""intermediate_size":512"#, r#""intermediate_size":520"#);
    check(true, wider, &["mlp.gate_proj.weight is [512, 256] and should be [520, 256]"]);
    for (scaling, fine) in [
        (r#"{"rope_type":"default"}"#, true),
        (r#"{"rope_type":"default","type":"default"}"#, true),
        (r#"{"rope_type":"default","type":"yarn"}"#, false),
        (r#"{"type":"default","rope_type":"yarn"}"#, false),
        (r#"{"type":"yarn","factor":4.0}"#, false),
        (r#"{"factor":4.0}"#, false),
    ] {
        let to = format!(r#""rope_scaling":{scaling},"rope_theta":"#);
        let scaled = |f: &std::path::Path| configured(f, r#""rope_theta":"#, &to);
        check(true, &scaled, if fine { &[] } else { &["rope_scaling", "one that cob does not compute"] });
    }
    check(true, &|f| std::fs::write(f.join(second), b"no").unwrap(), &["bad safetensors", second]);
}

#[test]
fn a_gguf_file_that_cannot_be_as_it_says_is_refused_by_name() {
    use candle_core::quantized::gguf_file::Value as V;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tiny.gguf");
    let opened = |expected: &str, what: &str| {
        let source = Source::open(&file);
        let why = source.and_then(|source| source.config()).map_or_else(|why| why, |_| String::new());
        assert!(why.contains(expected) && why.is_empty() == expected.is_empty(), "{what}: {why:?}");
        assert!(why.is_empty() || why.starts_with(file.to_str().unwrap()), "{what}: {why:?}");
    };
    let check = |key: &str, value: V, expected: &str| {
        write_gguf_with(&file, &SMALL, 1, GgmlDType::Q8_0, &[(key, value)]);
        opened(expected, key);
    };
    check("general.name", V::String("tiny".into()), "");
    check("general.architecture", V::String("llama".into()), "its architecture is `llama`");
    check("qwen2.block_count", V::U32(2), "qwen2.block_count is 2, and it holds 3 layers");
    check("qwen2.rope.scaling.type", V::String("none".into()), "");
    check("qwen2.rope.scaling.type", V::String("yarn".into()), "RoPE scaling `yarn`");
    check("qwen2.rope.scaling.type", V::U32(2), "qwen2.rope.scaling.type is not a string");
    check("qwen2.rope.scaling.factor", V::F32(1.0), "");
    check("qwen2.rope.scaling.factor", V::F32(4.0), "qwen2.rope.scaling.factor");
    check("qwen2.rope.dimension_count", V::U32(64), "");
    check("qwen2.rope.dimension_count", V::U32(32), "it rotates 32 of 64 elements");
    check("qwen2.expert_count", V::U32(0), "");
    check("qwen2.expert_count", V::U32(8), "it has 8 experts");

    write_gguf(&file, &SMALL, 1, GgmlDType::Q8_0);
    let whole = std::fs::read(&file).unwrap();
    // Where a tensor begins stands after its name, the number of its dimensions, the dimensions, and its type.
    let offset_of = |name: &str, dims: usize| {
        let at = whole.windows(name.len()).position(|window| window == name.as_bytes()).unwrap();
        at + name.len() + 4 + 8 * dims + 4
    };
    let moved = |to: u64, expected: &str| {
        let mut bytes = whole.clone();
        let at = offset_of("blk.1.attn_q.weight", 2);
        bytes[at..at + 8].copy_from_slice(&to.to_le_bytes());
        std::fs::write(&file, bytes).unwrap();
        opened(expected, &format!("a tensor at {to}"));
    };
    let at = offset_of("blk.1.attn_q.bias", 1);
    let taken = u64::from_le_bytes(whole[at..at + 8].try_into().unwrap());
    moved(taken, "overlap");
    moved(taken + 32, "blk.1.attn_q.weight overlap");
    moved(taken + 1, "tensor blk.1.attn_q.weight begins at");
    moved(1 << 40, "tensor blk.1.attn_q.weight lies past the end");
}

#[test]
fn a_tokenizer_that_cannot_be_as_it_says_is_refused_by_name() {
    use candle_core::quantized::gguf_file::Value as V;
    let folder = tempfile::tempdir().unwrap();
    let check = |other: &[(&str, V)], expected: &str| {
        let file = write_gguf_with(&folder.path().join("tiny.gguf"), &SMALL, 1, GgmlDType::Q8_0, other);
        let why = ChatFormat::open(&file, None).err().expect("it has no merges");
        assert!(why.contains(expected) && why.starts_with(file.to_str().unwrap()), "{other:?}: {why}");
    };
    let tokens = || ("tokenizer.ggml.tokens", V::Array(["a", "b"].map(|token| V::String(token.into())).to_vec()));
    let eos = |id| ("tokenizer.ggml.eos_token_id", id);
    check(&[("tokenizer.ggml.model", V::String("llama".into()))], "tokenizer.ggml.model is `llama`");
    check(&[tokens(), eos(V::U32(1))], "no tokenizer.ggml.merges");
    check(&[tokens(), eos(V::U32(2))], "eos_token_id is none of its 2 tokens");
    check(&[tokens(), eos(V::I32(-1))], "eos_token_id is none of its 2 tokens");
}

#[test]
fn quantised_files_agree_with_candle_transformers() {
    let folder = tempfile::tempdir().unwrap();
    for kind in [GgmlDType::Q8_0, GgmlDType::Q5_0, GgmlDType::Q4_0] {
        let path = write_gguf(&folder.path().join("tiny.gguf"), &SMALL, 3, kind);
        let mut file = std::fs::File::open(&path).unwrap();
        let content = gguf_file::Content::read(&mut file).unwrap();
        let mut theirs =
            candle_transformers::models::quantized_qwen2::ModelWeights::from_gguf(content, &mut file, &Device::Cpu)
                .unwrap();
        let mut expected: Vec<f32> = Vec::new();
        for i in 0..IDS.len() {
            let input = Tensor::new(&IDS[i..=i], &Device::Cpu).unwrap().unsqueeze(0).unwrap();
            expected.extend(theirs.forward(&input, i).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap());
        }
        // Activations are rounded to 8 bits, so the last bit of a sum before can move a logit by a hundredth; what must
        // agree to 1e-3 is the probability of every token.
        for backend in [candle(), cpu(2)] {
            let name = format!("{} {kind:?}", backend.name());
            let ours = run(&path, backend, KvType::F32);
            assert_close(&name, &probabilities(&ours), &probabilities(&expected), 1e-3);
            let mean = ours.iter().zip(&expected).map(|(a, b)| (a - b).abs()).sum::<f32>() / ours.len() as f32;
            assert!(mean < 0.02, "{name}: logits differ by {mean} on average");
        }
    }
}

/// Ours quantises activations; the distance to the exact pass is what that costs, for each type.
#[test]
fn every_type_is_near_the_exact_pass() {
    let folder = tempfile::tempdir().unwrap();
    use GgmlDType::*;
    for (kind, tolerance) in [
        (F32, 1e-3),
        (F16, 1e-3),
        (BF16, 1e-3),
        (Q4_0, 0.06),
        (Q5_0, 0.06),
        (Q8_0, 0.06),
        (Q4K, 0.06),
        (Q5K, 0.06),
        (Q6K, 0.06),
    ] {
        let path = write_gguf(&folder.path().join("tiny.gguf"), &SMALL, 4, kind);
        let expected = run(&path, exact(), KvType::F32);
        let spread = expected.iter().fold(0f32, |a, b| a.max(b.abs()));
        assert!(spread > 1.0, "the logits must say something: {spread}");
        assert_close(&format!("{kind:?}"), &run(&path, cpu(2), KvType::F32), &expected, tolerance);
    }
}

/// Bits, not tolerances: whatever the chunking, the threads and the tier, and after a fork and a rollback.
#[test]
fn a_position_has_the_same_bits_however_it_is_reached() {
    let folder = tempfile::tempdir().unwrap();
    use GgmlDType::*;
    for kind in [F32, F16, BF16, Q4_0, Q5_0, Q8_0, Q4K, Q5K, Q6K] {
        for kv_type in [KvType::F16, KvType::F32, KvType::Q8_0] {
            let path = write_gguf(&folder.path().join("tiny.gguf"), &SMALL, 5, kind);
            let ids: Vec<u32> = (0..150).map(|i| (i * 31 + 7) % 300).collect();
            let mut model = Model::open(&path, cpu(1), kv_type).unwrap();
            let mut kv = model.new_kv();
            let expected = all_logits(&mut model, &mut kv, &ids, &[ids.len()]);
            for chunks in [&[1][..], &[2, 3, 1, 4], &[5, 64, 7], &[63, 1, 70]] {
                let mut kv = model.new_kv();
                assert!(expected == all_logits(&mut model, &mut kv, &ids, chunks), "{kind:?}, chunks {chunks:?}");
            }
            let tiers = Tier::available().into_iter().map(|tier| Backend::Cpu { tier, threads: 2 });
            for backend in [cpu(2), cpu(3)].into_iter().chain(tiers) {
                let name = format!("{kind:?}, {backend:?}");
                let mut other = Model::open(&path, backend, kv_type).unwrap();
                let mut kv = other.new_kv();
                assert!(expected == all_logits(&mut other, &mut kv, &ids, &[97, 2]), "{name}");
            }
            let vocab = model.config().vocab;
            // A fork writes its own tokens; the original, rolled back, goes on as if nothing had been.
            let mut fork = kv.clone();
            fork.truncate(70);
            all_logits(&mut model, &mut fork, &[1, 2, 3, 4, 5], &[5]);
            kv.truncate(80);
            let again = all_logits(&mut model, &mut kv, &ids[80..], &[9]);
            assert!(expected[80 * vocab..] == again, "{kind:?} after a rollback");
        }
    }
}

/// Heads of other lengths and other groups, in each tier: long vectors take what is left over alone.
#[test]
fn attention_has_the_same_bits_in_each_tier() {
    let folder = tempfile::tempdir().unwrap();
    for (hidden, heads, kv_heads) in [(256, 16, 2), (192, 4, 4), (256, 2, 1), (480, 6, 2)] {
        let shape = Shape { vocab: 296, hidden, layers: 2, heads, kv_heads, intermediate: 256, tied: false };
        let path = write_gguf(&folder.path().join("heads.gguf"), &shape, 9, GgmlDType::F32);
        let ids: Vec<u32> = (0..140).map(|i| (i * 31 + 7) % 290).collect();
        for kv_type in [KvType::F16, KvType::F32, KvType::Q8_0] {
            if kv_type == KvType::Q8_0 && !(hidden / heads).is_multiple_of(32) {
                continue; // refused by name when it is opened
            }
            let mut oracle = Model::open(&path, Backend::Cpu { tier: Tier::Portable, threads: 1 }, kv_type).unwrap();
            let expected = oracle.forward(&mut oracle.new_kv(), &ids, Logits::All, &|| false).unwrap();
            for tier in Tier::available().into_iter().filter(|&tier| tier != Tier::Portable) {
                let mut model = Model::open(&path, Backend::Cpu { tier, threads: 2 }, kv_type).unwrap();
                let rows = model.forward(&mut model.new_kv(), &ids, Logits::All, &|| false).unwrap();
                assert!(rows == expected, "{heads} heads of {}, {kv_type:?}, {tier:?}", hidden / heads);
            }
        }
    }
}

/// The real matrices' lengths, with an odd number of panels in the head: 1 to 70 rows in one pass, each tier, one and two threads.
#[test]
fn a_row_has_the_same_bits_among_one_to_seventy() {
    let folder = tempfile::tempdir().unwrap();
    use GgmlDType::*;
    // K-quants come in blocks of 256, and 896 is no multiple of that.
    for (kind, hidden, heads) in
        [(Q4_0, 896, 14), (Q5_0, 896, 14), (Q8_0, 896, 14), (Q4K, 768, 12), (Q5K, 768, 12), (Q6K, 768, 12)]
    {
        let shape = Shape { vocab: 296, hidden, layers: 1, heads, kv_heads: 2, intermediate: 4864, tied: false };
        let path = write_gguf(&folder.path().join("wide.gguf"), &shape, 8, kind);
        let ids: Vec<u32> = (0..70).map(|i| (i * 31 + 7) % 290).collect();
        let mut oracle = Model::open(&path, Backend::Cpu { tier: Tier::Portable, threads: 2 }, KvType::F16).unwrap();
        let expected = oracle.forward(&mut oracle.new_kv(), &ids, Logits::All, &|| false).unwrap();
        for tier in Tier::available().into_iter().filter(|&tier| tier != Tier::Portable) {
            for threads in [1, 2] {
                let mut model = Model::open(&path, Backend::Cpu { tier, threads }, KvType::F16).unwrap();
                for n in 1..=70 {
                    let rows = model.forward(&mut model.new_kv(), &ids[..n], Logits::All, &|| false).unwrap();
                    assert!(rows == expected[..n * shape.vocab], "{kind:?}, {tier:?}, {threads} threads, {n} rows");
                }
            }
        }
    }
}

/// Several sequences in one pass, each with rows of its own and logits of its own, against each of them alone.
#[test]
fn a_sequence_has_the_same_bits_in_a_batch() {
    let folder = tempfile::tempdir().unwrap();
    use GgmlDType::*;
    let passes: &[&[(usize, Logits)]] = &[
        &[(1, Logits::Last), (1, Logits::Last), (1, Logits::Last), (1, Logits::Last)],
        &[(3, Logits::Tail(2)), (64, Logits::None), (1, Logits::Last), (5, Logits::All)],
        &[(1, Logits::Last), (1, Logits::Last)],
        &[(70, Logits::Last), (1, Logits::All), (2, Logits::Tail(9))],
        &[(1, Logits::None)],
        &[(1, Logits::Last), (9, Logits::Tail(4)), (1, Logits::Last), (1, Logits::Last)],
    ];
    for (kind, backend) in [F32, F16, BF16, Q4_0, Q5_0, Q8_0, Q4K, Q5K, Q6K]
        .into_iter()
        .flat_map(|kind| [(kind, cpu(1)), (kind, cpu(2))])
        .chain([(Q8_0, candle())])
    {
        let path = write_gguf(&folder.path().join("tiny.gguf"), &SMALL, 12, kind);
        let mut model = Model::open(&path, backend, KvType::F16).unwrap();
        let token = |sequence: usize, i: usize| ((sequence * 101 + i * 17 + 3) % 300) as u32;
        // They begin at different depths, the second as a fork of the first.
        let mut batched: Vec<Kv> = Vec::new();
        for (sequence, depth) in [130usize, 130, 0, 7].into_iter().enumerate() {
            let mut kv = model.new_kv();
            let ids: Vec<u32> = (0..depth).map(|i| token(sequence.max(1), i)).collect();
            if !ids.is_empty() && sequence != 1 {
                model.forward(&mut kv, &ids, Logits::None, &|| false).unwrap();
            }
            batched.push(if sequence == 1 { batched[0].clone() } else { kv });
        }
        let mut alone = batched.clone();
        for pass in passes {
            let ids: Vec<Vec<u32>> = pass
                .iter()
                .enumerate()
                .map(|(s, &(n, _))| (0..n).map(|i| token(s, 1000 + batched[s].len() + i)).collect())
                .collect();
            let expected: Vec<Vec<f32>> = pass
                .iter()
                .enumerate()
                .map(|(s, &(_, logits))| model.forward(&mut alone[s], &ids[s], logits, &|| false).unwrap())
                .collect();
            let mut parts: Vec<Part> = batched
                .iter_mut()
                .zip(&ids)
                .zip(*pass)
                .map(|((kv, ids), &(_, logits))| Part { kv, ids, logits })
                .collect();
            let calls = std::cell::Cell::new(0);
            let cancelled = || calls.replace(calls.get() + 1) == 2;
            assert!(model.forward_batch(&mut parts, &cancelled).is_err(), "a pass that is given up changes nothing");
            let rows = model.forward_batch(&mut parts, &|| false).unwrap();
            assert!(rows == expected, "{kind:?}, pass {pass:?}");
        }
    }
}

#[test]
fn chunked_prefill_on_candle_agrees() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_gguf(&folder.path().join("tiny.gguf"), &SMALL, 6, GgmlDType::Q8_0);
    let mut model = Model::open(&path, exact(), KvType::F32).unwrap();
    let mut kv = model.new_kv();
    let expected = all_logits(&mut model, &mut kv, &IDS, &[IDS.len()]);
    let mut fork = kv.clone();
    fork.truncate(10);
    let vocab = model.config().vocab;
    let again = all_logits(&mut model, &mut fork, &IDS[10..], &[1, 7, 3]);
    assert_close("chunks after a rollback", &again, &expected[10 * vocab..], 1e-4);
}
