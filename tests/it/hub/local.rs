//! A local file as source; finding, verifying and removing what is here.

use std::path::Path;

use cob::hub::{Checked, DEFAULT_MODEL, Format, Kind, Model, Origin, Record, Resolved};
use tokio_util::sync::CancellationToken;

use super::server::FakeHub;
use super::{Home, lfs, manifest, model_bytes, sha256, tiny};

fn resolve(home: &Home, named: [Option<&str>; 3]) -> Result<Resolved, cob::hub::HubError> {
    home.hub().resolve(named[0], named[1], named[2], &CancellationToken::new(), &mut |_| ())
}

fn ready(home: &Home, value: &str) -> Model {
    match resolve(home, [Some(value), None, None]).unwrap() {
        Resolved::Ready(model) => model,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_file_of_the_user_is_checked_and_copied() {
    let bytes = model_bytes();
    let home = Home::new(None, vec![tiny(Some(&sha256(&bytes)))]);
    let mine = home.dir.path().join("mine.gguf");
    std::fs::write(&mine, &bytes[1..]).unwrap();
    let e = home.pull_from("tiny", Some(&mine)).0.unwrap_err();
    assert_eq!(e.kind, Kind::WrongDigest);
    assert!(e.to_string().contains("mine.gguf") && e.to_string().contains("nothing was installed"), "{e}");
    assert!(home.visible().is_empty());

    std::fs::write(&mine, &bytes).unwrap();
    let pulled = home.pull_from("tiny", Some(&mine)).0.unwrap();
    assert_eq!((pulled.source.as_str(), pulled.files[0].checked), ("file", Checked::Manifest));
    assert!(mine.exists());
    let e = Home::new(None, vec![tiny(None)]).pull_from("tiny", Some(Path::new("/nowhere/x"))).0.unwrap_err();
    assert!(e.to_string().contains("cannot read /nowhere/x"), "{e}");
}

/// A manifest that knows the size of its file.
fn sized(bytes: usize) -> cob::hub::Manifest {
    manifest("tiny", &format!("sources=['hf']\nfiles=[{{name='tiny.gguf', bytes={bytes}}}]"))
}

#[test]
fn what_cannot_be_the_file_is_not_copied() {
    let bytes = model_bytes();
    let home = Home::new(None, vec![sized(bytes.len())]);
    let mine = home.dir.path().join("mine.gguf");
    let pipe = home.dir.path().join("pipe.gguf");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    let check = |from: &Path, kind: Kind, part: &str| {
        let e = home.pull_from("tiny", Some(from)).0.unwrap_err();
        assert!(e.kind == kind && e.to_string().contains(part), "{}: {e}", from.display());
        assert!(!home.staged("tiny.gguf.file.part").exists());
    };
    check(Path::new("/dev/zero"), Kind::Unknown, "/dev/zero is not a regular file");
    check(&pipe, Kind::Unknown, "is not a regular file");
    std::fs::write(&mine, &bytes[1..]).unwrap();
    check(&mine, Kind::WrongDigest, "has 299999 bytes, expected 300000; nothing was installed");
}

#[test]
fn a_file_of_the_wrong_size_is_damaged_and_not_absent() {
    let bytes = model_bytes();
    let home = Home::new(None, vec![sized(bytes.len())]);
    let mine = home.dir.path().join("mine.gguf");
    std::fs::write(&mine, &bytes).unwrap();
    let path = home.pull_from("tiny", Some(&mine)).0.unwrap().path;
    std::fs::write(&path, &bytes[..5000]).unwrap();
    for e in [resolve(&home, [Some("tiny"), None, None]).map(drop), home.hub().path("tiny").map(drop)] {
        let e = e.unwrap_err();
        assert_eq!(e.kind, Kind::WrongDigest);
        assert!(e.to_string().contains("tiny.gguf has 5000 bytes, expected"), "{e}");
        assert!(e.to_string().contains("`cob model pull tiny`"), "{e}");
    }
    assert!(!home.pull_from("tiny", Some(&mine)).0.unwrap().already);
    assert_eq!(home.hub().path("tiny").unwrap(), path);
}

#[test]
fn a_damaged_model_is_found_and_fetched_again() {
    let bytes = model_bytes();
    let server = FakeHub::start(vec![lfs("tiny.gguf", &bytes)]);
    let home = Home::new(Some(&server), vec![tiny(Some(&sha256(&bytes)))]);
    let path = home.pull("tiny").0.unwrap().path;
    let verify = || home.hub().verify("tiny", &CancellationToken::new(), &mut |_| ()).unwrap();
    assert!(verify()[0].ok);

    // The same size and time: only hashing can tell, and `verify` hashes.
    let meta = std::fs::metadata(&path).unwrap();
    let mut damaged = bytes.clone();
    damaged[500] ^= 1;
    std::fs::write(&path, &damaged).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_modified(meta.modified().unwrap()).unwrap();
    let found = verify();
    assert!(!found[0].ok && found[0].sha256 == sha256(&damaged), "{found:?}");

    // A changed time makes the record stale, and the model is refused before it is used.
    std::fs::File::options().write(true).open(&path).unwrap().set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    let e = resolve(&home, [Some("tiny"), None, None]).unwrap_err();
    assert_eq!(e.kind, Kind::WrongDigest);
    assert!(e.to_string().contains("`cob model pull tiny`"), "{e}");
    let (result, notes) = home.pull("tiny");
    assert!(!result.unwrap().already);
    assert!(notes.iter().any(|n| n.contains("is damaged")), "{notes:?}");
    assert!(verify()[0].ok);
}

#[test]
fn a_file_without_a_record_is_hashed_once() {
    let bytes = model_bytes();
    let home = Home::new(None, vec![tiny(Some(&sha256(&bytes)))]);
    std::fs::create_dir_all(home.models()).unwrap();
    std::fs::write(home.models().join("tiny.gguf"), &bytes).unwrap();
    let hashed = || {
        let mut events = 0;
        let hub = home.hub();
        hub.resolve(Some("tiny"), None, None, &CancellationToken::new(), &mut |_| events += 1).unwrap();
        events > 0
    };
    assert!(hashed());
    let record = Record::load(&home.models().join("tiny.gguf.json")).unwrap();
    assert_eq!((record.source.as_str(), record.files[0].checked), ("found on disk", Checked::Manifest));
    assert!(!hashed());
}

#[test]
fn removing_takes_everything_of_a_model_and_nothing_else() {
    let bytes = model_bytes();
    let home = Home::new(None, vec![tiny(None), manifest("other", "sources=['hf']\nfiles=[{name='other.gguf'}]")]);
    assert_eq!(home.hub().remove("tiny").unwrap_err().kind, Kind::NotInstalled);
    assert_eq!(home.hub().path("tiny").unwrap_err().kind, Kind::NotInstalled);
    let mine = home.dir.path().join("mine.gguf");
    std::fs::write(&mine, &bytes).unwrap();
    home.pull_from("tiny", Some(&mine)).0.unwrap();
    home.pull_from("other", Some(&mine)).0.unwrap();
    std::fs::create_dir_all(home.staged("")).unwrap();
    std::fs::write(home.staged("tiny.gguf.hf.part"), b"1234").unwrap();
    assert_eq!(home.hub().path("tiny").unwrap(), home.models().join("tiny.gguf"));
    let (removed, freed) = home.hub().remove("tiny").unwrap();
    assert_eq!(removed.len(), 3);
    assert!(freed > bytes.len() as u64 + 4);
    assert_eq!(home.visible(), ["other.gguf", "other.gguf.json"]);
}

#[test]
fn the_flag_wins_over_the_variable_over_the_config_over_the_default() {
    let ids = ["flag", "variable", "config", DEFAULT_MODEL];
    let manifests =
        ids.map(|id| manifest(id, &format!("sources=['hf']\nfiles=[{{name='{id}.gguf', bytes=1117320768}}]")));
    let home = Home::new(None, manifests.to_vec());
    let check = |named: [Option<&str>; 3], id: &str, origin: Origin| {
        let Resolved::NeedsPull(needs) = resolve(&home, named).unwrap() else { panic!("installed?") };
        assert_eq!((needs.id.as_str(), needs.origin), (id, origin), "{named:?}");
        assert_eq!((needs.size().as_str(), needs.bytes_have), ("1.12 GB", 0));
    };
    check([Some("flag"), Some("variable"), Some("config")], "flag", Origin::Flag);
    check([None, Some("variable"), Some("config")], "variable", Origin::Environment);
    check([None, Some(""), Some("config")], "config", Origin::Config);
    check([None, None, None], DEFAULT_MODEL, Origin::Default);
    let e = resolve(&home, [None, Some("variabel"), None]).unwrap_err();
    assert_eq!(e.kind, Kind::Unknown);
    assert!(e.to_string().contains("COB_MODEL") && e.to_string().contains("the nearest are variable"), "{e}");
}

#[test]
fn a_path_is_a_model_too() {
    let bytes = model_bytes();
    let home = Home::new(None, vec![tiny(Some(&sha256(&bytes)))]);
    let folder = home.dir.path().join("của tôi 模型");
    std::fs::create_dir(&folder).unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_string()
    };

    // The bytes of a known model are that model, wherever they lie; the folder gets nothing beside them.
    let known = ready(&home, &write("bản sao.gguf", &bytes));
    assert_eq!((known.id.as_str(), known.format), ("tiny", Format::Gguf));
    assert!(known.manifest.is_some());
    let other = ready(&home, &write("other.gguf", b"GGUF and more"));
    assert_eq!((other.id.as_str(), other.digest), ("other", sha256(b"GGUF and more")));
    assert!(other.manifest.is_none());
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 2);
    let changed = ready(&home, &write("other.gguf", b"GGUF and yet more"));
    assert_eq!(changed.digest, sha256(b"GGUF and yet more"));

    let check = |value: &str, part: &str| {
        let e = resolve(&home, [Some(value), None, None]).unwrap_err();
        assert!(e.kind == Kind::Unknown && e.to_string().contains(part), "{value}: {e}");
    };
    check(&write("text.gguf", b"hello"), "is not a GGUF file");
    check(&write("short.gguf", b""), "is not a GGUF file");
    check("/dev/null", "is not a regular file");
    check("/nowhere/x.gguf", "does not exist");
    check("x.gguf", "does not exist");
    check("tin", "the nearest are tiny");
    check(folder.to_str().unwrap(), "without config.json");
    write("config.json", b"{}");
    check(folder.to_str().unwrap(), "without config.json and *.safetensors");
    write("model-00001-of-00002.safetensors", b"1");
    write("model-00002-of-00002.safetensors", b"2");
    let sharded = ready(&home, folder.to_str().unwrap());
    assert_eq!((sharded.format, sharded.files.len(), sharded.bytes), (Format::Safetensors, 3, 4));
    assert_eq!(sharded.id, "của tôi 模型");
}
