//! Decode at several depths, and what constraints cost: `cargo bench --bench decode -- --quick`.

mod common;

use std::time::Duration;

use cob::chat::mask::CallMask;
use cob::chat::qwen::ChatFormat;
use cob::engine::{CHUNK, Mask};
use cob::message::ToolChoice;
use cob::model::{Backend, KvType, Logits, Model};
use criterion::{BenchmarkId, Criterion};

fn main() {
    let (path, _folder) = common::model();
    let mut criterion = Criterion::default().sample_size(10).configure_from_args();
    decode(&mut criterion, &path);
    constraints(&mut criterion, &path);
    criterion.final_summary();
}

fn decode(criterion: &mut Criterion, path: &std::path::Path) {
    let mut model = Model::open(path, Backend::cpu(), KvType::F16).expect("the model loads");
    let mut group = criterion.benchmark_group("decode one token");
    for depth in [0, 512, 4096] {
        let mut kv = model.new_kv();
        let ids: Vec<u32> = (0..depth as u32).map(|i| (i * 7919 + 13) % 150_000).collect();
        for chunk in ids.chunks(CHUNK) {
            model.forward(&mut kv, chunk, Logits::None, &|| false).expect("a forward pass");
        }
        let mut id = 0;
        group.bench_function(BenchmarkId::from_parameter(format!("depth {depth}")), |b| {
            b.iter(|| {
                id = (id + 7919) % 150_000;
                let logits = model.forward(&mut kv, &[id], Logits::Last, &|| false).expect("a forward pass");
                kv.truncate(depth);
                logits
            })
        });
    }
    group.finish();
}

fn constraints(criterion: &mut Criterion, path: &std::path::Path) {
    let format = ChatFormat::open(path, Some(151_936)).expect("the tokenizer loads");
    let mut group = criterion.benchmark_group("constraints");
    group.measurement_time(Duration::from_secs(3));
    format.grammars.warm();
    for n in [1, 5, 20, 50] {
        let mut run = 0;
        group.bench_function(BenchmarkId::new("compile the grammar", format!("{n} tools")), |b| {
            b.iter(|| {
                // A new name each time: the cache must not answer.
                run += 1;
                let mut tools = common::tools(n);
                tools[0].name = format!("fresh_{run}");
                let names: Vec<String> = tools.iter().map(|tool| tool.name.clone()).collect();
                let grammar = format.grammars.compile(&tools);
                format.grammars.matcher(&grammar, &names).expect("a matcher")
            })
        });
    }
    let grammar = format.grammars.compile(&common::tools(20));
    let mask = |choice| CallMask::new(format.grammars.clone(), grammar.clone(), choice, true).expect("a mask");
    let mut logits = vec![0f32; 151_936];
    let mut text = mask(ToolChoice::Auto);
    group.bench_function("mask in free text", |b| b.iter(|| text.allow(&mut logits)));
    // Inside the string of an argument: the widest choice that a grammar gives.
    let mut call = mask(ToolChoice::Named("search_tickets_3".into()));
    loop {
        let forced = call.forced();
        if forced.is_empty() {
            break;
        }
        for id in forced {
            call.accept(id).expect("a forced token is accepted");
        }
    }
    for id in format.grammars.tokenizer().encode_text("\"login") {
        logits.fill(0.0);
        call.allow(&mut logits).expect("a mask");
        if logits[id as usize].is_finite() {
            call.accept(id).expect("an allowed token is accepted");
        }
    }
    group.bench_function("mask in an argument", |b| {
        b.iter(|| {
            logits.fill(0.0);
            call.allow(&mut logits)
        })
    });
    group.finish();
}
