//! The prefix store on disk: what another process finds gives the same bits, and what is damaged is a miss that is said.

use std::path::{Path, PathBuf};

use candle_core::quantized::GgmlDType;
use cob::engine::store::{self, PrefixStore, StoreSettings};
use cob::engine::{Engine, KEPT_TOKENS_MIN, Report, Request, Settings};
use cob::model::{Backend, Kv, KvType, Logits, Model, Part, Tier};

use crate::real::model_file;
use crate::tiny::{SMALL, write_gguf};

const TOKENS: usize = 200;

fn model(kv: KvType) -> Model {
    model_on(Backend::cpu(), kv)
}

/// Where KV lives in tensors, as on a GPU.
fn candle() -> Backend {
    Backend::Candle { device: candle_core::Device::Cpu, exact: false }
}

fn model_on(backend: Backend, kv: KvType) -> Model {
    let folder = tempfile::tempdir().unwrap();
    let path = write_gguf(&folder.path().join("tiny.gguf"), &SMALL, 11, GgmlDType::Q8_0);
    Model::open(&path, backend, kv).unwrap()
}

fn settings(dir: &Path) -> StoreSettings {
    StoreSettings { dir: dir.to_owned(), fingerprint: [7; 32], bytes_max: 1 << 30, tokens_min: 64 }
}

fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i * 37 + 11) % 300).collect()
}

fn forward(model: &mut Model, kv: &mut Kv, ids: &[u32]) -> Vec<u32> {
    let Ok(logits) = model.forward(kv, ids, Logits::Last, &|| false) else { panic!("the model runs") };
    logits.into_iter().map(f32::to_bits).collect()
}

fn filled(model: &mut Model, ids: &[u32]) -> Kv {
    let mut kv = model.new_kv();
    forward(model, &mut kv, ids);
    kv
}

/// A store with one prefix, and its file.
fn stored(dir: &Path, model: &mut Model) -> PathBuf {
    let kv = filled(model, &ids(TOKENS));
    let mut writer = PrefixStore::new(settings(dir));
    writer.save(&ids(TOKENS), kv);
    writer.finish();
    assert_eq!(writer.take_notes(), Vec::<String>::new());
    let (entries, bad) = store::list(dir).unwrap();
    assert_eq!((entries.len(), entries[0].tokens, bad.len()), (1, TOKENS, 0));
    entries[0].path.clone()
}

#[test]
fn what_is_found_gives_the_same_bits() {
    let ours = [KvType::F16, KvType::F32, KvType::Q8_0].map(|kv_type| (Backend::cpu(), kv_type));
    let candles = [KvType::F16, KvType::F32].map(|kv_type| (candle(), kv_type));
    for (backend, kv_type) in ours.into_iter().chain(candles) {
        let dir = tempfile::tempdir().unwrap();
        let is_ours = matches!(backend, Backend::Cpu { .. });
        let mut model = model_on(backend, kv_type);
        let path = stored(dir.path(), &mut model);
        store::verify(&path).unwrap();
        // The whole prefix, a part that ends within a block, and one that only begins the same.
        let other: Vec<u32> = ids(150).into_iter().chain((0..200).map(|i| (i * 13 + 1) % 300)).collect();
        for (prompt, limit, found) in [
            (ids(TOKENS + 50), TOKENS + 49, TOKENS),
            (ids(TOKENS), TOKENS - 1, TOKENS - 1),
            (other.clone(), other.len() - 1, 150),
        ] {
            let mut reader = PrefixStore::new(settings(dir.path()));
            let kv = reader.lookup(model.kv_shape(), &prompt, limit, 0).unwrap();
            let mut kv = model.take_in(kv).unwrap();
            assert_eq!((kv.len(), reader.take_notes().len()), (found, 0));
            let mut cold = filled(&mut model, &prompt[..found]);
            let next = forward(&mut model, &mut kv, &prompt[found..]);
            assert_eq!(next, forward(&mut model, &mut cold, &prompt[found..]));
            // Rolled back into the mapped part and forward again.
            kv.truncate(70);
            let again = forward(&mut model, &mut kv, &prompt[70..]);
            // candle's bits depend on how many rows a pass has.
            cold.truncate(70);
            let expected = if is_ours { next } else { forward(&mut model, &mut cold, &prompt[70..]) };
            assert_eq!(again, expected);
        }
        // Nothing of what was written into the sequences is in the file.
        store::verify(&path).unwrap();
        let mut reader = PrefixStore::new(settings(dir.path()));
        let shape = model.kv_shape();
        assert!(reader.lookup(shape, &[9, 9, 9], 2, 0).is_none());
        assert!(reader.lookup(shape, &ids(TOKENS), TOKENS - 1, TOKENS - 63).is_none(), "not worth a look");
        assert!(reader.take_notes().is_empty());
    }
}

/// A miss with a note, whatever is wrong with the file.
#[track_caller]
fn misses(model: &Model, settings: StoreSettings, note: &str) {
    let mut reader = PrefixStore::new(settings);
    let found = reader.lookup(model.kv_shape(), &ids(TOKENS + 1), TOKENS, 0);
    assert!(found.is_none(), "{note}");
    let notes = reader.take_notes();
    assert!(notes.len() == 1 && notes[0].contains(note), "{note}: {notes:?}");
    // Said once.
    assert!(reader.lookup(model.kv_shape(), &ids(TOKENS + 1), TOKENS, 0).is_none());
    assert!(reader.take_notes().is_empty());
}

#[test]
fn every_damage_is_a_miss_with_a_note() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = model(KvType::F16);
    let path = stored(dir.path(), &mut model);
    let whole = std::fs::read(&path).unwrap();
    let length = whole.len();
    let blocks = TOKENS.div_ceil(64) * model.kv_shape().block_bytes();
    let header = length - blocks;
    // Each byte of the fixed part and of the fingerprint and shape, then some of the ids, sums and zeros, and of every block.
    let of_header = (0..80).chain((80..header).step_by(97));
    for at in of_header.chain((header..length).step_by(blocks / 50)).chain([length - 1]) {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x10;
        std::fs::write(&path, &damaged).unwrap();
        misses(&model, settings(dir.path()), "damaged");
        assert!(store::verify(&path).is_err(), "byte {at}");
    }
    for n in 0..100 {
        std::fs::write(&path, &whole[..length * n / 100]).unwrap();
        misses(&model, settings(dir.path()), "damaged");
    }
    std::fs::write(&path, [&whole[..], b"x"].concat()).unwrap();
    misses(&model, settings(dir.path()), "damaged");
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    misses(&model, settings(dir.path()), "cannot be read");
    std::fs::remove_dir(&path).unwrap();

    // Whole, but of another model: under its own name it is not looked at, under ours it is seen.
    std::fs::write(&path, &whole).unwrap();
    let mut fingerprint = [7; 32];
    fingerprint[31] = 8;
    misses(&model, StoreSettings { fingerprint, ..settings(dir.path()) }, "of another model");
    let mut reader = PrefixStore::new(StoreSettings { fingerprint: [8; 32], ..settings(dir.path()) });
    assert!(reader.lookup(model.kv_shape(), &ids(TOKENS + 1), TOKENS, 0).is_none() && reader.take_notes().is_empty());
    let other = self::model(KvType::F32);
    misses(&other, settings(dir.path()), "of another shape");

    // A damaged file is written again by whoever computes the prefix.
    std::fs::write(&path, &whole[..length / 2]).unwrap();
    let mut process = PrefixStore::new(settings(dir.path()));
    assert!(process.lookup(model.kv_shape(), &ids(TOKENS + 1), TOKENS, 0).is_none());
    let kv = filled(&mut model, &ids(TOKENS));
    process.save(&ids(TOKENS), kv);
    process.finish();
    assert_eq!(std::fs::read(&path).unwrap(), whole);
}

/// What has a right checksum may still have been made by someone else.
#[test]
fn what_cannot_be_a_prefix_is_said_and_hinders_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = model(KvType::F16);
    let path = stored(dir.path(), &mut model);
    let shorter = filled(&mut model, &ids(150));
    let mut writer = PrefixStore::new(settings(dir.path()));
    writer.save(&ids(150), shorter);
    writer.finish();
    let whole = std::fs::read(&path).unwrap();
    // Layers, KV heads, elements of a head: their product overflows. Then a header that claims to be as long as the file allows.
    let mut absurd = whole.clone();
    absurd[52..64].fill(0xFF);
    let length = u32::from_le_bytes(whole[16..20].try_into().unwrap()) as usize;
    let sum = twox_hash::XxHash3_64::oneshot(&absurd[16..length]);
    absurd[8..16].copy_from_slice(&sum.to_le_bytes());
    let mut long = whole.clone();
    long[16..20].copy_from_slice(&0xFFFF_F000u32.to_le_bytes());
    for bytes in [absurd, long] {
        std::fs::write(&path, bytes).unwrap();
        if whole.len() < 1 << 30 {
            std::fs::File::options().write(true).open(&path).unwrap().set_len(0xFFFF_F000).unwrap();
        }
        assert!(store::verify(&path).is_err());
        // The other file begins as the prompt does too.
        let mut reader = PrefixStore::new(settings(dir.path()));
        let kv = reader.lookup(model.kv_shape(), &ids(TOKENS + 1), TOKENS, 0).unwrap();
        let notes = reader.take_notes();
        assert!(kv.len() == 150 && notes.len() == 1 && notes[0].contains("damaged"), "{notes:?}");
    }
    // A block that is wrong is seen only when the file is chosen: the next best is taken.
    let mut damaged = whole.clone();
    *damaged.last_mut().unwrap() ^= 1;
    std::fs::write(&path, damaged).unwrap();
    let mut reader = PrefixStore::new(settings(dir.path()));
    assert_eq!(reader.lookup(model.kv_shape(), &ids(TOKENS + 1), TOKENS, 0).unwrap().len(), 150);
    assert_eq!(reader.take_notes().len(), 1);
    // A pipe is not waited for, and a link that leads nowhere is nothing.
    #[cfg(unix)]
    {
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("nowhere", path.with_file_name("0707070707070707-x.kv")).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let mut reader = PrefixStore::new(settings(dir.path()));
        assert_eq!(reader.lookup(model.kv_shape(), &ids(TOKENS + 1), TOKENS, 0).unwrap().len(), 150);
        let notes = reader.take_notes();
        assert!(notes.len() == 1 && notes[0].contains("no regular file"), "{notes:?}");
    }
}

#[test]
fn what_could_not_be_written_is_said_once() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = model(KvType::F16);
    let kv = filled(&mut model, &ids(TOKENS));
    let mut process = PrefixStore::new(StoreSettings { bytes_max: 1000, ..settings(dir.path()) });
    for _ in 0..3 {
        process.save(&ids(TOKENS), kv.clone());
        process.finish();
    }
    let notes = process.take_notes();
    assert!(notes.len() == 1 && notes[0].contains("not kept on disk"), "{notes:?}");
}

#[test]
fn writers_do_not_get_in_each_others_way() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = model(KvType::F16);
    let kv = filled(&mut model, &ids(TOKENS));
    std::thread::scope(|scope| {
        for n in 0..8 {
            let (kv, dir) = (kv.clone(), dir.path());
            scope.spawn(move || {
                for round in 0..5 {
                    let mut writer = PrefixStore::new(settings(dir));
                    let mut shorter = kv.clone();
                    shorter.truncate(TOKENS - n % 2);
                    writer.save(&ids(TOKENS)[..TOKENS - n % 2], shorter);
                    writer.finish();
                    assert_eq!(writer.take_notes(), Vec::<String>::new(), "{n} {round}");
                    if round == 2 {
                        let _ = store::clear(dir);
                    }
                }
            });
        }
    });
    let (entries, bad) = store::list(dir.path()).unwrap();
    assert!(bad.is_empty() && entries.len() <= 2, "{entries:?} {bad:?}");
    for entry in entries {
        store::verify(&entry.path).unwrap();
    }
}

#[test]
fn the_least_recently_used_goes_first() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = model(KvType::F16);
    let size = std::fs::metadata(stored(dir.path(), &mut model)).unwrap().len();
    let settings = StoreSettings { bytes_max: 3 * size, ..settings(dir.path()) };
    // What a process that died left, long ago and just now.
    let old = std::time::SystemTime::now() - std::time::Duration::from_secs(7200);
    for (name, time) in [(".writing-old", old), (".writing-new", std::time::SystemTime::now())] {
        let file = std::fs::File::create(dir.path().join(name)).unwrap();
        file.set_modified(time).unwrap();
    }
    let save = |model: &mut Model, first: u32| {
        let ids: Vec<u32> = (0..TOKENS as u32).map(|i| (i * 7 + first) % 300).collect();
        let kv = filled(model, &ids);
        let mut process = PrefixStore::new(settings.clone());
        process.save(&ids, kv);
        process.finish();
        assert!(process.take_notes().is_empty());
    };
    let age = || {
        // The clock of some file systems is coarse.
        for entry in store::list(dir.path()).unwrap().0 {
            let file = std::fs::File::options().append(true).open(entry.path).unwrap();
            let time = file.metadata().unwrap().modified().unwrap() - std::time::Duration::from_secs(10);
            file.set_modified(time).unwrap();
        }
    };
    for first in [1, 2] {
        age();
        save(&mut model, first);
    }
    age();
    // The first one is used, so the second goes.
    let mut reader = PrefixStore::new(settings.clone());
    assert!(reader.lookup(model.kv_shape(), &ids(TOKENS + 1), TOKENS, 0).is_some());
    save(&mut model, 3);
    let (entries, _) = store::list(dir.path()).unwrap();
    assert_eq!(entries.len(), 3);
    let mut reader = PrefixStore::new(settings.clone());
    assert!(reader.lookup(model.kv_shape(), &ids(TOKENS + 1), TOKENS, 0).is_some());
    assert!(!dir.path().join(".writing-old").exists() && dir.path().join(".writing-new").exists());
    let (count, bytes) = store::clear(dir.path()).unwrap();
    assert_eq!((count, bytes), (3, 3 * size));

    // What is kept already counts as used when it would be kept again.
    save(&mut model, 1);
    age();
    save(&mut model, 1);
    assert!(store::list(dir.path()).unwrap().0[0].unused_s < 5);
    store::clear(dir.path()).unwrap();

    // One that cannot fit is not written, and that is said.
    let mut process = PrefixStore::new(StoreSettings { bytes_max: size - 1, ..settings });
    let kv = filled(&mut model, &ids(TOKENS));
    process.save(&ids(TOKENS), kv);
    process.finish();
    let notes = process.take_notes();
    assert!(notes.len() == 1 && notes[0].contains("not kept on disk"), "{notes:?}");
    assert!(store::list(dir.path()).unwrap().0.is_empty());
}

fn engine(dir: &Path, backend: Backend) -> Engine {
    let settings = Settings { context_tokens: 2048, cache_bytes: 64 << 20, store: Some(settings(dir)), drafts: true };
    Engine::start(model_on(backend, KvType::F16), settings).unwrap()
}

fn run(engine: &Engine, prompt: Vec<u32>, pinned: usize) -> Report {
    engine.run(Request { pinned, ..Request::greedy(prompt, 20) }).unwrap()
}

/// Three processes, one after the other: the first computes, the second finds the pinned prefix, the third a session's end.
#[test]
fn the_next_process_begins_where_the_last_one_was() {
    processes(&Backend::cpu());
}

#[test]
fn so_it_does_with_keys_and_values_on_a_device() {
    processes(&candle());
}

fn processes(backend: &Backend) {
    let engine = |dir: &Path| engine(dir, backend.clone());
    let dir = tempfile::tempdir().unwrap();
    let (pinned, asked) = (300, 300 + KEPT_TOKENS_MIN);
    let first = engine(dir.path());
    let cold = run(&first, ids(asked), pinned);
    assert_eq!((cold.usage.cached_tokens, cold.usage.restored_tokens), (0, 0));
    drop(first);
    assert_eq!(store::list(dir.path()).unwrap().0.len(), 1);

    let second = engine(dir.path());
    let warm = run(&second, ids(asked), pinned);
    let usage = warm.usage;
    assert_eq!((usage.cached_tokens, usage.restored_tokens, usage.prefilled_tokens), (pinned, pinned, asked - pinned));
    assert_eq!((&warm.ids, warm.notes.len()), (&cold.ids, 0));
    // Now it is in memory.
    let again = run(&second, ids(asked), pinned);
    assert_eq!((again.usage.cached_tokens, again.usage.restored_tokens), (asked - 1, 0));
    second.keep();
    drop(second);
    let (entries, bad) = store::list(dir.path()).unwrap();
    let mut tokens: Vec<usize> = entries.iter().map(|entry| entry.tokens).collect();
    tokens.sort();
    let kept = asked + cold.ids.len() - 1;
    assert_eq!((tokens, bad.len()), (vec![pinned, kept], 0));

    let third = engine(dir.path());
    let next: Vec<u32> = ids(asked).into_iter().chain(cold.ids.clone()).chain([5, 6, 7]).collect();
    let resumed = run(&third, next.clone(), pinned);
    assert_eq!((resumed.usage.cached_tokens, resumed.usage.restored_tokens), (kept, kept));
    // What is hardly longer than the pinned prefix is not kept besides it.
    run(&third, ids(pinned + 50), pinned);
    third.keep();
    drop(third);
    assert_eq!(store::list(dir.path()).unwrap().0.len(), 2);

    // Damage: computed again, said, and the same.
    for entry in store::list(dir.path()).unwrap().0 {
        let mut bytes = std::fs::read(&entry.path).unwrap();
        let at = bytes.len() - 100;
        bytes[at] ^= 1;
        std::fs::write(&entry.path, bytes).unwrap();
    }
    let fourth = engine(dir.path());
    let healed = run(&fourth, next, 300);
    assert_eq!((healed.usage.cached_tokens, &healed.ids), (0, &resumed.ids));
    assert!(healed.notes.iter().any(|note| note.contains("is damaged")), "{:?}", healed.notes);
}

/// Of the real file: cold, in chunks, after a rollback, resumed from disk, in a batch of 1 to 4, with 1 and 2 threads, in every tier but
/// the portable one (which is slow, and is held to the same bits on small files).
#[test]
fn the_real_file_has_the_same_bits_however_a_position_is_reached() {
    let Some(path) = model_file("qwen2.5-coder-0.5b-instruct-q4_k_m") else { return };
    let ids: Vec<u32> = (0..150u32).map(|i| 1000 + i * 977 % 100_000).collect();
    let (at, dir) = (100, tempfile::tempdir().unwrap());
    for kv_type in [KvType::F16, KvType::Q8_0] {
        let mut expected = Vec::new();
        let mut settings = settings(dir.path());
        settings.fingerprint[0] = kv_type as u8;
        for (tier, threads) in
            Tier::available().into_iter().filter(|tier| *tier != Tier::Portable).flat_map(|tier| [(tier, 1), (tier, 2)])
        {
            let mut model = Model::open(&path, Backend::Cpu { tier, threads }, kv_type).unwrap();
            let what = format!("{kv_type:?}, {tier:?}, {threads} threads");
            let mut cold = model.new_kv();
            let logits = forward(&mut model, &mut cold, &ids);
            if expected.is_empty() {
                expected = logits;
                let mut kv = cold.clone();
                kv.truncate(at);
                let mut store = PrefixStore::new(settings.clone());
                store.save(&ids[..at], kv);
                store.finish();
            } else {
                assert!(logits == expected, "{what}, cold");
            }
            let mut kv = model.new_kv();
            [0..64, 64..67, 67..68, 68..at].into_iter().for_each(|part| drop(forward(&mut model, &mut kv, &ids[part])));
            assert!(forward(&mut model, &mut kv.clone(), &ids[at..]) == expected, "{what}, in chunks");
            let mut back = kv.clone();
            forward(&mut model, &mut back, &ids[..30]);
            back.truncate(at);
            assert!(forward(&mut model, &mut back, &ids[at..]) == expected, "{what}, after a rollback");
            let found = PrefixStore::new(settings.clone()).lookup(model.kv_shape(), &ids, ids.len() - 1, 0);
            let mut found = found.expect("it was kept");
            assert!(forward(&mut model, &mut found, &ids[at..]) == expected, "{what}, from disk");
            for others in 0..4 {
                let mut kvs: Vec<Kv> = (0..=others).map(|_| kv.clone()).collect();
                let mut parts: Vec<Part> = kvs
                    .iter_mut()
                    .enumerate()
                    .map(|(i, kv)| Part {
                        kv,
                        ids: if i == 0 { &ids[at..] } else { &ids[i..2 * i] },
                        logits: Logits::Last,
                    })
                    .collect();
                let rows = model.forward_batch(&mut parts, &|| false).unwrap();
                let row: Vec<u32> = rows[0].iter().map(|x| x.to_bits()).collect();
                assert!(row == expected, "{what}, beside {others} others");
            }
        }
    }
}
