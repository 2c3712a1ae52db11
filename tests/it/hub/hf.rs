//! The `hf` source.

use std::time::Duration;

use cob::hub::{Checked, HubEvent, Kind, Record, Resolved};
use tokio_util::sync::CancellationToken;

use super::server::{Act, COMMIT, FakeHub, Served};
use super::{Home, git, lfs, manifest, model_bytes, sha256, tiny};

#[test]
fn a_plain_pull_installs_checks_and_records() {
    let bytes = model_bytes();
    let server = FakeHub::start(vec![lfs("tiny.gguf", &bytes)]);
    let home = Home::new(Some(&server), vec![tiny(None)]);
    let mut last = (0, None);
    let hub = home.hub();
    let pulled = hub
        .pull("tiny", None, &CancellationToken::new(), &mut |event| {
            if let HubEvent::Progress { what, bytes_done, bytes_total } = event
                && what == "fetching tiny.gguf from hf"
            {
                assert!(bytes_done >= last.0);
                last = (bytes_done, bytes_total);
            }
        })
        .unwrap();
    let size = bytes.len() as u64;
    assert_eq!(last, (size, Some(size)));
    assert_eq!(std::fs::read(home.models().join("tiny.gguf")).unwrap(), bytes);
    assert_eq!((pulled.digest.as_str(), pulled.already), (sha256(&bytes).as_str(), false));
    assert_eq!((pulled.source.as_str(), pulled.revision.as_deref()), ("hf", Some(COMMIT)));
    assert_eq!(home.visible(), ["tiny.gguf", "tiny.gguf.json"]);
    let record = Record::load(&home.models().join("tiny.gguf.json")).unwrap();
    assert_eq!((record.files[0].checked, record.files[0].sha256.as_str()), (Checked::Hub, pulled.digest.as_str()));
    // The bytes are those of the commit that was answered, whatever the branch does meanwhile.
    let resolved: Vec<_> = server.requests("GET").into_iter().filter(|r| r.path.contains("/resolve/")).collect();
    assert!(resolved.iter().all(|r| r.path.contains(COMMIT)), "{resolved:?}");

    // A second pull asks nobody, and finding the model hashes nothing.
    let before = server.state.lock().unwrap().requests.len();
    assert!(home.pull("tiny").0.unwrap().already);
    assert_eq!(server.state.lock().unwrap().requests.len(), before);
    let mut events = 0;
    let resolved = hub.resolve(Some("tiny"), None, None, &CancellationToken::new(), &mut |_| events += 1).unwrap();
    let Resolved::Ready(model) = resolved else { panic!("{resolved:?}") };
    assert_eq!((model.digest, model.bytes, events), (pulled.digest, size, 0));
}

#[test]
fn a_broken_connection_is_resumed_and_no_byte_is_fetched_twice() {
    let bytes = model_bytes();
    let check = |acts: &[Act], ranges: &[Option<&str>], served: usize| {
        let server = FakeHub::start(vec![lfs("tiny.gguf", &bytes)]);
        server.set(|state| state.acts = acts.iter().copied().collect());
        let mut home = Home::new(Some(&server), vec![tiny(None)]);
        if acts.iter().any(|act| matches!(act, Act::Stall(_))) {
            home.settings.limits.stall = Duration::from_secs(1);
        }
        let (result, notes) = home.pull("tiny");
        assert_eq!(result.unwrap().digest, sha256(&bytes), "{acts:?}: {notes:?}");
        let found: Vec<Option<String>> = server.gets().into_iter().map(|r| r.range).collect();
        let expected: Vec<Option<String>> = ranges.iter().map(|r| r.map(String::from)).collect();
        assert_eq!(found, expected, "{acts:?}");
        assert_eq!(server.bytes_served(), served, "{acts:?}");
        assert_eq!(notes.iter().any(|n| n.contains("broke off")), ranges.len() > 1, "{notes:?}");
    };
    let all = bytes.len();
    check(&[], &[None], all);
    check(&[Act::Cut(100_000)], &[None, Some("bytes=100000-")], all);
    check(&[Act::Cut(100_000), Act::Cut(50_000)], &[None, Some("bytes=100000-"), Some("bytes=150000-")], all);
    check(&[Act::Stall(70_000)], &[None, Some("bytes=70000-")], all);
    check(&[Act::Cut(0), Act::Status(503)], &[None, None, None], all);
    check(&[Act::Cut(90_000), Act::Status(502)], &[None, Some("bytes=90000-"), Some("bytes=90000-")], all);
    // A server that cannot resume sends everything again, and that is used from its beginning.
    check(&[Act::Cut(90_000), Act::IgnoreRange], &[None, Some("bytes=90000-")], all + 90_000);
    check(&[Act::Cut(90_000), Act::Status(416)], &[None, Some("bytes=90000-"), None], all + 90_000);
}

#[test]
fn an_interrupted_pull_goes_on_in_the_next_one() {
    let bytes = model_bytes();
    let server = FakeHub::start(vec![lfs("tiny.gguf", &bytes)]);
    server.set(|state| state.acts = [Act::Cut(120_000)].into_iter().chain([Act::Status(503); 3]).collect());
    let home = Home::new(Some(&server), vec![tiny(None)]);
    let e = home.pull("tiny").0.unwrap_err();
    assert_eq!(e.kind, Kind::Unreachable);
    assert!(e.to_string().contains("120000 of") && e.to_string().contains("run it again"), "{e}");
    assert!(home.visible().is_empty(), "{:?}", home.visible());
    let hub = home.hub();
    let resolved = hub.resolve(Some("tiny"), None, None, &CancellationToken::new(), &mut |_| ()).unwrap();
    assert!(matches!(resolved, Resolved::NeedsPull(needs) if needs.bytes_have == 120_000));

    let (result, notes) = home.pull("tiny");
    assert_eq!(result.unwrap().digest, sha256(&bytes));
    assert!(notes.iter().any(|n| n.contains("going on after 120000")), "{notes:?}");
    assert_eq!(server.bytes_served(), bytes.len());
    assert!(!home.staged("").exists());
}

#[test]
fn a_cancelled_pull_stops_soon_and_can_go_on() {
    let bytes = model_bytes();
    let server = FakeHub::start(vec![lfs("tiny.gguf", &bytes)]);
    server.set(|state| state.acts = [Act::Stall(80_000)].into_iter().collect());
    let mut home = Home::new(Some(&server), vec![tiny(None)]);
    home.settings.limits.stall = Duration::from_secs(600);
    let cancel = CancellationToken::new();
    let hub = home.hub();
    let e = hub
        .pull("tiny", None, &cancel, &mut |event| {
            if matches!(event, HubEvent::Progress { bytes_done: 80_000, .. }) {
                cancel.cancel();
            }
        })
        .unwrap_err();
    assert_eq!(e.kind, Kind::Cancelled);
    assert!(e.to_string().contains("goes on where it stopped"), "{e}");
    assert_eq!(home.pull("tiny").0.unwrap().digest, sha256(&bytes));
    assert_eq!(server.bytes_served(), bytes.len());
}

#[test]
fn a_part_that_is_complete_or_of_another_file_is_handled() {
    let bytes = model_bytes();
    let check = |part: &[u8], etag: &str, gets: usize| {
        let server = FakeHub::start(vec![lfs("tiny.gguf", &bytes)]);
        let home = Home::new(Some(&server), vec![tiny(None)]);
        std::fs::create_dir_all(home.staged("")).unwrap();
        std::fs::write(home.staged("tiny.gguf.hf.part"), part).unwrap();
        let part_of = format!("{{\"etag\":\"{etag}\",\"bytes\":{}}}", bytes.len());
        std::fs::write(home.staged("tiny.gguf.hf.json"), part_of).unwrap();
        assert_eq!(home.pull("tiny").0.unwrap().digest, sha256(&bytes));
        assert_eq!(server.gets().len(), gets);
    };
    let etag = sha256(&bytes);
    check(&bytes, &etag, 0);
    check(&bytes[..1000], "another", 1);
    let longer = [bytes.as_slice(), b"more"].concat();
    check(&longer, &etag, 1);
}

#[test]
fn a_wrong_digest_installs_nothing_and_leaves_nothing() {
    let bytes = model_bytes();
    let mut other = bytes.clone();
    other[1000] ^= 1;
    let check = |served: Served, digest: Option<&str>, gets: usize| {
        let server = FakeHub::start(vec![served]);
        let home = Home::new(Some(&server), vec![tiny(digest)]);
        let e = home.pull("tiny").0.unwrap_err();
        assert_eq!(e.kind, Kind::WrongDigest, "{e}");
        assert!(e.to_string().contains("expected") && e.to_string().contains("--from FILE"), "{e}");
        assert!(home.visible().is_empty(), "{:?}", home.visible());
        assert!(!home.staged("tiny.gguf.hf.part").exists());
        assert_eq!(server.gets().len(), gets, "{e}");
    };
    // The bytes are not those that the hub lists.
    check(Served { bytes: other.clone(), ..lfs("tiny.gguf", &bytes) }, None, 1);
    // The hub lists others than the manifest: found before a byte is fetched.
    check(lfs("tiny.gguf", &other), Some(&sha256(&bytes)), 0);
    // A plain git file with the wrong content.
    check(git("tiny.gguf", &other), Some(&sha256(&bytes)), 1);
}

#[test]
fn offline_asks_nobody() {
    let server = FakeHub::start(vec![lfs("tiny.gguf", &model_bytes())]);
    let mut home = Home::new(Some(&server), vec![tiny(None)]);
    home.settings.offline = true;
    let e = home.pull("tiny").0.unwrap_err();
    assert_eq!(e.kind, Kind::Offline);
    assert!(e.to_string().contains("without --offline"), "{e}");
    assert!(server.state.lock().unwrap().requests.is_empty());
}

#[test]
fn the_users_hub_cache_is_used_without_the_network() {
    let bytes = model_bytes();
    let digest = sha256(&bytes);
    // (manifest knows the digest, the content is right, in a snapshot)
    let check = |known: bool, right: bool, snapshot: bool, expected: Option<Checked>| {
        let mut home = Home::new(None, vec![tiny(known.then_some(digest.as_str()))]);
        home.settings.offline = true;
        let repo = home.settings.hf_cache.join("models--org--model");
        let blob = repo.join("blobs").join(&digest);
        std::fs::create_dir_all(blob.parent().unwrap()).unwrap();
        let mut content = bytes.clone();
        content[9] ^= u8::from(!right);
        std::fs::write(&blob, content).unwrap();
        if snapshot {
            std::fs::create_dir_all(repo.join("snapshots").join(COMMIT)).unwrap();
            std::fs::create_dir_all(repo.join("refs")).unwrap();
            std::fs::write(repo.join("refs/main"), COMMIT).unwrap();
            let link = repo.join("snapshots").join(COMMIT).join("tiny.gguf");
            std::os::unix::fs::symlink(format!("../../blobs/{digest}"), link).unwrap();
        }
        let (result, notes) = home.pull("tiny");
        match expected {
            Some(checked) => {
                let pulled = result.unwrap();
                assert_eq!(
                    (pulled.source.as_str(), &pulled.digest, pulled.files[0].checked),
                    ("hf cache", &digest, checked)
                );
                assert_eq!(pulled.revision.as_deref(), snapshot.then_some(COMMIT).filter(|_| !known));
                assert!(notes.iter().any(|n| n.contains("found in the hub cache")), "{notes:?}");
                // Linked, not copied: the same file, and the cache keeps its own.
                use std::os::unix::fs::MetadataExt;
                let inode = |path: &std::path::Path| std::fs::metadata(path).unwrap().ino();
                assert_eq!(inode(&pulled.path), inode(&blob));
                assert!(!std::fs::symlink_metadata(&pulled.path).unwrap().is_symlink());
            }
            None => {
                assert_eq!(result.unwrap_err().kind, Kind::Offline);
                assert!(home.visible().is_empty());
                assert!(blob.exists(), "the user's file is left alone");
                assert_eq!(notes.iter().any(|n| n.contains("is not used")), !right, "{notes:?}");
            }
        }
    };
    check(true, true, false, Some(Checked::Manifest));
    check(true, true, true, Some(Checked::Manifest));
    check(false, true, true, Some(Checked::Hub));
    check(false, true, false, None);
    check(true, false, true, None);
    check(false, false, true, None);
}

#[test]
fn the_token_goes_to_the_hub_and_nowhere_else() {
    let bytes = model_bytes();
    let check = |token: Option<&str>, expected: Result<(), &str>| {
        let server = FakeHub::start(vec![lfs("tiny.gguf", &bytes)]);
        server.set(|state| state.token = Some("hf_secret".into()));
        let mut home = Home::new(Some(&server), vec![tiny(None)]);
        home.settings.token = token.map(String::from);
        let result = home.pull("tiny").0;
        match expected {
            Ok(()) => {
                result.unwrap();
                let requests = server.state.lock().unwrap().requests.clone();
                assert!(requests.len() >= 3);
                for request in requests {
                    let to_hub = request.path.contains("/resolve/");
                    let expected = to_hub.then(|| "Bearer hf_secret".to_string());
                    assert_eq!(request.authorization, expected, "{request:?}");
                }
            }
            Err(part) => {
                let e = result.unwrap_err();
                assert!(e.kind == Kind::Failed && e.to_string().contains(part), "{e}");
                assert!(!e.to_string().contains("hf_wrong"), "{e}");
            }
        }
    };
    check(Some("hf_secret"), Ok(()));
    check(None, Err("set HF_TOKEN"));
    check(Some("hf_wrong"), Err("check HF_TOKEN"));
}

#[test]
fn a_hub_that_does_not_answer_is_given_up() {
    let default = cob::hub::Limits::default();
    assert!(default.probe < Duration::from_secs(10));

    let server = FakeHub::start(vec![lfs("tiny.gguf", &model_bytes())]);
    server.set(|state| state.silent = true);
    let mut home = Home::new(Some(&server), vec![tiny(None)]);
    home.settings.limits.probe = Duration::from_millis(200);
    let check = |home: &Home, part: &str| {
        let e = home.pull("tiny").0.unwrap_err();
        assert_eq!(e.kind, Kind::Unreachable, "{e}");
        assert!(e.to_string().contains(part) && e.to_string().contains("check the network"), "{e}");
        assert!(home.visible().is_empty());
    };
    check(&home, "cannot be reached");
    home.settings.endpoint = "http://127.0.0.1:9".into();
    check(&home, "http://127.0.0.1:9 cannot be reached");
}

#[test]
fn a_hub_without_the_file_and_one_that_is_none_are_named() {
    let server = FakeHub::start(vec![]);
    let mut home = Home::new(Some(&server), vec![tiny(None)]);
    let e = home.pull("tiny").0.unwrap_err();
    assert!(e.to_string().contains("has no tiny.gguf at main (HTTP 404)"), "{e}");
    // The address of the bytes alone has no commit to answer with.
    let mut plain = git("tiny.gguf", b"x");
    plain.etag = String::new();
    server.set(|state| state.files = vec![plain]);
    home.settings.endpoint = format!("{}/nowhere", server.endpoint());
    let e = home.pull("tiny").0.unwrap_err();
    assert!(e.to_string().contains("404"), "{e}");
}

#[test]
fn two_pulls_at_once_fetch_once() {
    let bytes = model_bytes();
    let server = FakeHub::start(vec![lfs("tiny.gguf", &bytes)]);
    server.set(|state| state.pause = Duration::from_millis(20));
    let home = Home::new(Some(&server), vec![tiny(None)]);
    let (started, waiting) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            home.hub().pull("tiny", None, &CancellationToken::new(), &mut |event| {
                if matches!(event, HubEvent::Progress { bytes_done: 1.., .. }) {
                    let _ = started.send(());
                }
            })
        });
        waiting.recv().unwrap();
        // While it is fetched it cannot be removed.
        assert_eq!(home.hub().remove("tiny").unwrap_err().kind, Kind::Busy);
        let (second, notes) = home.pull("tiny");
        assert!(second.unwrap().already);
        assert!(notes.iter().any(|n| n.contains("another process is fetching `tiny`")), "{notes:?}");
        assert!(!first.join().unwrap().unwrap().already);
    });
    assert_eq!(server.bytes_served(), bytes.len());
    assert_eq!(std::fs::read(home.models().join("tiny.gguf")).unwrap(), bytes);
}

#[test]
fn a_full_disk_ends_in_one_line() {
    let bytes = model_bytes();
    // Found out before: no disk has room for this.
    let server = FakeHub::start(vec![Served { announced: Some(1 << 60), ..lfs("tiny.gguf", &bytes) }]);
    let home = Home::new(Some(&server), vec![tiny(None)]);
    let e = home.pull("tiny").0.unwrap_err();
    assert_eq!(e.kind, Kind::DiskFull);
    assert!(e.to_string().contains("still needed") && e.to_string().contains("COB_HOME"), "{e}");
    assert!(server.gets().is_empty());

    // Found out while writing: /dev/full fails every write as a full disk does.
    if !std::path::Path::new("/dev/full").exists() {
        eprintln!("skipped: there is no /dev/full here");
        return;
    }
    let server = FakeHub::start(vec![lfs("tiny.gguf", &bytes)]);
    let home = Home::new(Some(&server), vec![tiny(None)]);
    std::fs::create_dir_all(home.staged("")).unwrap();
    std::os::unix::fs::symlink("/dev/full", home.staged("tiny.gguf.hf.part")).unwrap();
    let part_of = format!("{{\"etag\":\"{}\",\"bytes\":{}}}", sha256(&bytes), bytes.len());
    std::fs::write(home.staged("tiny.gguf.hf.json"), part_of).unwrap();
    let e = home.pull("tiny").0.unwrap_err();
    assert_eq!(e.kind, Kind::DiskFull, "{e}");
    assert!(e.to_string().contains("the disk is full") && e.to_string().contains("COB_HOME"), "{e}");
    assert!(home.visible().is_empty());
}

#[test]
fn a_safetensors_folder_appears_whole() {
    let bytes = model_bytes();
    let config = br#"{"architectures":["Qwen2ForCausalLM"]}"#;
    let server = FakeHub::start(vec![git("config.json", config), lfs("model.safetensors", &bytes)]);
    let files = "sources = ['hf']\nfiles = [{ name = 'config.json' }, { name = 'model.safetensors' }]";
    let home = Home::new(Some(&server), vec![manifest("tiny", files)]);
    server.set(|state| state.acts = [Act::Serve, Act::Cut(1000)].into_iter().chain([Act::Status(500); 3]).collect());
    assert_eq!(home.pull("tiny").0.unwrap_err().kind, Kind::Unreachable);
    assert!(home.visible().is_empty());

    let (result, _) = home.pull("tiny");
    let pulled = result.unwrap();
    assert_eq!(home.visible(), ["tiny", "tiny.json"]);
    assert_eq!(std::fs::read(pulled.path.join("config.json")).unwrap(), config);
    assert_eq!(std::fs::read(pulled.path.join("model.safetensors")).unwrap(), bytes);
    let checked: Vec<Checked> = pulled.files.iter().map(|f| f.checked).collect();
    assert_eq!(checked, [Checked::Size, Checked::Hub]);

    // The same folder by its path is the same model.
    let hub = home.hub();
    let resolve = |value: &str| {
        let resolved = hub.resolve(Some(value), None, None, &CancellationToken::new(), &mut |_| ());
        let Resolved::Ready(model) = resolved.unwrap() else { panic!("not ready") };
        model
    };
    let (by_id, by_path) = (resolve("tiny"), resolve(pulled.path.to_str().unwrap()));
    assert_eq!(by_id.digest, by_path.digest);
    assert_eq!((by_id.format, by_path.format), (cob::hub::Format::Safetensors, cob::hub::Format::Safetensors));
}
