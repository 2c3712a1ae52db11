//! The `hf` source: the user's hub cache, then the hub itself.
//!
//! `hf-hub` gives the layout of the cache, the addresses and the token. The transfer is our own, on the HTTP client that
//! `hf-hub` uses, because its download (0.5.0) has no time limit anywhere, so that a server that accepts and falls
//! silent hangs it for ever; asks for `bytes=N-` of a part that is already complete and fails on the answer 416 at every
//! later try; appends the whole file to the part when a server ignores the range; after a failed resume asks again from
//! position 0 and appends; cannot be cancelled; and renames into the user's cache without looking at the digest.

use std::fs::OpenOptions;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use hf_hub::{Cache, Repo, RepoType};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::manifest::is_sha256;
use super::pull::{Fetched, FetchedFile, Job};
use super::record::{Checked, write_atomically};
use super::{HubError, HubSettings, Kind, ManifestFile};

/// What the hub says of a file.
struct Meta {
    /// The commit that the revision stands for.
    commit: String,
    /// An LFS oid is a SHA-256; a plain git file has another one.
    etag: String,
    bytes: u64,
}

/// What a part file is a part of; beside it, so that a part of something else is not gone on with.
#[derive(PartialEq, Serialize, Deserialize)]
struct PartOf {
    etag: String,
    bytes: u64,
}

pub(super) fn fetch(job: &mut Job) -> Result<Fetched, HubError> {
    let manifest = job.manifest;
    let settings = job.hub.settings();
    let repo = Repo::with_revision(manifest.repository.clone(), RepoType::Model, manifest.revision.clone());

    // Everything that needs the network is asked for before the first large byte, so that the total is known.
    let mut revision = None;
    let mut from_hub = false;
    let mut fetched: Vec<Option<FetchedFile>> = Vec::new();
    let mut missing = Vec::new();
    for (index, file) in manifest.files.iter().enumerate() {
        let found = from_cache(job, settings, &repo, file)?;
        if found.is_none() {
            if settings.offline {
                return Err(HubError::new(Kind::Offline, format!("{} is not in the hub cache", file.name)));
            }
            let meta = probe(settings, &repo, &file.name, job.cancel)?;
            let sha256 = expected(file, &meta)?;
            revision = Some(meta.commit.clone());
            missing.push((index, meta, sha256));
            from_hub = true;
        }
        fetched.push(found.map(|(file, commit)| {
            revision = revision.take().or(commit);
            file
        }));
    }

    let total: u64 = missing.iter().map(|(_, meta, _)| meta.bytes).sum();
    let mut before = 0;
    for (index, meta, sha256) in missing {
        let name = &manifest.files[index].name;
        let ready = job.ready(name);
        let complete = match (&sha256, std::fs::metadata(&ready)) {
            // Here from an interrupted pull of several files.
            (Some(sha256), Ok(_)) => job.hash(&ready, name)? == *sha256,
            _ => false,
        };
        if !complete {
            download(job, settings, &repo, name, &meta, before, total)?;
        }
        before += meta.bytes;
        let checked = match (&manifest.files[index].sha256, &sha256) {
            (Some(_), _) => Checked::Manifest,
            (None, Some(_)) => Checked::Hub,
            (None, None) => Checked::Size,
        };
        let digest = if complete {
            sha256.unwrap_or_default()
        } else {
            job.accept(&part_path(job, name), name, sha256.as_ref(), Some(meta.bytes))?
        };
        let _ = std::fs::remove_file(part_of_path(job, name));
        fetched[index] = Some(FetchedFile { sha256: digest, checked });
    }
    Ok(Fetched {
        source: if from_hub { "hf" } else { "hf cache" }.into(),
        repository: Some(manifest.repository.clone()),
        revision,
        files: fetched.into_iter().flatten().collect(),
    })
}

/// The digest to check: the manifest's, else the hub's. A hub that now lists another file is found out before a byte of
/// it is fetched.
fn expected(file: &ManifestFile, meta: &Meta) -> Result<Option<String>, HubError> {
    let oid = Some(&meta.etag).filter(|etag| is_sha256(etag));
    if let (Some(ours), Some(theirs)) = (&file.sha256, oid)
        && ours != theirs
    {
        let why = format!("the hub lists another {} (sha256 {theirs}, expected {ours})", file.name);
        return Err(HubError::new(Kind::WrongDigest, why));
    }
    if let Some(bytes) = file.bytes
        && bytes != meta.bytes
    {
        let why = format!("the hub lists another {} ({} bytes, expected {bytes})", file.name, meta.bytes);
        return Err(HubError::new(Kind::WrongDigest, why));
    }
    Ok(file.sha256.clone().or_else(|| oid.cloned()))
}

/// Takes a file from the user's hub cache: linked, or copied where the cache is on another disk. The digest is checked
/// like that of a download; a file that fails is left alone and not used.
fn from_cache(
    job: &mut Job,
    settings: &HubSettings,
    repo: &Repo,
    file: &ManifestFile,
) -> Result<Option<(FetchedFile, Option<String>)>, HubError> {
    let cache = Cache::new(settings.hf_cache.clone()).repo(repo.clone());
    let pointer = |commit: &str| Some(cache.pointer_path(commit).join(&file.name)).filter(|path| path.is_file());
    // By its digest, whatever commit it was fetched for; else by the revision.
    let by_digest = file.sha256.as_ref().map(|sha256| cache.blob_path(sha256)).filter(|path| path.is_file());
    let by_revision = || pointer(repo.revision()).or_else(|| cache.get(&file.name));
    let Some(found) = by_digest.or_else(by_revision) else { return Ok(None) };
    let Ok(blob) = found.canonicalize() else { return Ok(None) };
    let commit = found
        .strip_prefix(cache.pointer_path("x").parent().unwrap_or(Path::new("")))
        .ok()
        .and_then(|rest| Some(rest.components().next()?.as_os_str().to_string_lossy().into_owned()));
    let oid = blob.file_name().map(|name| name.to_string_lossy().into_owned()).filter(|name| is_sha256(name));
    let expected = file.sha256.clone().or(oid);

    let part = job.staging.join(format!("{}.cache.part", file.name));
    let _ = std::fs::remove_file(&part);
    if std::fs::hard_link(&blob, &part).is_err() {
        let what = format!("copying {} from the hub cache", file.name);
        job.copy(&blob, &part, &what)?;
    }
    match job.accept(&part, &file.name, expected.as_ref(), file.bytes) {
        Ok(sha256) => {
            let checked = match (&file.sha256, &expected) {
                (Some(_), _) => Checked::Manifest,
                (None, Some(_)) => Checked::Hub,
                (None, None) => Checked::Nothing,
            };
            job.note(format!("{}: found in the hub cache ({})", file.name, settings.hf_cache.display()));
            Ok(Some((FetchedFile { sha256, checked }, commit)))
        }
        Err(e) if e.kind == Kind::WrongDigest => {
            job.note(format!("{}: the file in the hub cache is not used: {e}", file.name));
            Ok(None)
        }
        Err(e) => Err(e),
    }
}

fn url(settings: &HubSettings, repo: &Repo, revision: &str, name: &str) -> String {
    format!("{}/{}/resolve/{}/{name}", settings.endpoint, repo.url(), revision.replace('/', "%2F"))
}

/// The token goes to the hub alone, never to where it redirects (its store of bytes is another host).
fn headers<B>(mut request: ureq::RequestBuilder<B>, address: &str, settings: &HubSettings) -> ureq::RequestBuilder<B> {
    // A compressed answer would make the lengths and ranges those of something else.
    request = request.header("Accept-Encoding", "identity");
    request = request.header("User-Agent", concat!("cob/", env!("CARGO_PKG_VERSION")));
    match &settings.token {
        Some(token) if origin(address) == origin(&settings.endpoint) => {
            request.header("Authorization", format!("Bearer {token}"))
        }
        _ => request,
    }
}

/// Scheme, host and port of an address.
fn origin(address: &str) -> &str {
    let host = address.find("://").map_or(0, |i| i + 3);
    &address[..address[host..].find(['/', '?', '#']).map_or(address.len(), |i| host + i)]
}

/// Where the `location` of an answer from `address` leads.
fn redirected(address: &str, location: &str) -> String {
    let scheme = location.find("://");
    if scheme.is_some_and(|i| location[..i].bytes().all(|b| b.is_ascii_alphanumeric())) {
        return location.to_string();
    }
    if location.starts_with("//") {
        return format!("{}:{location}", address.split("://").next().unwrap_or("https"));
    }
    if location.starts_with('/') {
        return format!("{}{location}", origin(address));
    }
    let path = address.split(['?', '#']).next().unwrap_or(address);
    format!("{}/{location}", path.rsplit_once('/').map_or(path, |(folder, _)| folder))
}

/// Asks for a file's commit, etag and size. All of it, redirects included, within [`super::Limits::probe`].
fn probe(settings: &HubSettings, repo: &Repo, name: &str, cancel: &CancellationToken) -> Result<Meta, HubError> {
    let (sender, receiver) = sync_channel(1);
    let job = (settings.clone(), repo.clone(), name.to_string());
    // On a thread of its own, because name resolution and a silent server can block past any limit of the client.
    std::thread::spawn(move || {
        let (settings, repo, name) = job;
        let _ = sender.send(ask(&settings, &repo, &name));
    });
    match receive(&receiver, settings.limits.probe, cancel) {
        Ok(answer) => answer,
        Err(Silence::Cancelled) => Err(HubError::new(Kind::Cancelled, "cancelled")),
        Err(_) => Err(unreachable(settings, &format!("no answer within {:.0?}", settings.limits.probe))),
    }
}

fn unreachable(settings: &HubSettings, why: &str) -> HubError {
    HubError::new(Kind::Unreachable, format!("{} cannot be reached ({why})", settings.endpoint))
}

fn ask(settings: &HubSettings, repo: &Repo, name: &str) -> Result<Meta, HubError> {
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(0)
        .timeout_global(Some(settings.limits.probe))
        .build()
        .into();
    let mut address = url(settings, repo, repo.revision(), name);
    let mut commit = None;
    // The commit, the oid and the size stand on the hub's own answer. A redirect within the hub (a renamed repository, a
    // plain git file) is followed; one to another host leads to the bytes, and is the answer.
    for _ in 0..6 {
        let response = headers(agent.head(&address), &address, settings)
            .call()
            .map_err(|e| unreachable(settings, &e.to_string()))?;
        let header = |key: &str| response.headers().get(key).and_then(|value| value.to_str().ok());
        let status = response.status().as_u16();
        commit = header("x-repo-commit").map(String::from).or(commit);
        if (300..400).contains(&status) && header("x-linked-etag").is_none() {
            let next = redirected(&address, header("location").unwrap_or_default());
            if origin(&next) == origin(&settings.endpoint) {
                address = next;
                continue;
            }
        }
        if !(200..400).contains(&status) {
            return Err(refused(settings, repo, name, status));
        }
        let etag = header("x-linked-etag").or(header("etag")).unwrap_or_default();
        let etag = etag.trim_start_matches("W/").trim_matches('"').to_string();
        let bytes = header("x-linked-size").or(header("content-length")).and_then(|n| n.trim().parse().ok());
        let missing = |what: &str| {
            let why = format!("{} answers without {what}: it does not speak the hub's protocol", settings.endpoint);
            Err(HubError::new(Kind::Failed, why))
        };
        let (Some(commit), Some(bytes)) = (commit.clone(), bytes) else { return missing("x-repo-commit and a size") };
        if etag.is_empty() {
            return missing("an etag");
        }
        return Ok(Meta { commit, etag, bytes });
    }
    Err(HubError::new(Kind::Failed, format!("{} redirects in a circle", settings.endpoint)))
}

fn refused(settings: &HubSettings, repo: &Repo, name: &str, status: u16) -> HubError {
    let place = format!("{}/{}", settings.endpoint, repo.url());
    let why = match (status, &settings.token) {
        (401 | 403, None) => format!("{place} wants a token (HTTP {status}): set HF_TOKEN"),
        (401 | 403, Some(_)) => format!("{place} refuses the token (HTTP {status}): check HF_TOKEN"),
        (404, _) => format!("{place} has no {name} at {} (HTTP 404)", repo.revision()),
        (429, _) => format!("{place} is asked too often (HTTP 429): wait a minute"),
        _ => format!("{place} answers HTTP {status}"),
    };
    HubError::new(if status >= 500 || status == 429 { Kind::Unreachable } else { Kind::Failed }, why)
}

fn part_path(job: &Job, name: &str) -> PathBuf {
    job.staging.join(format!("{name}.hf.part"))
}

fn part_of_path(job: &Job, name: &str) -> PathBuf {
    job.staging.join(format!("{name}.hf.json"))
}

/// Brings the part file to its full length, from where it stands. Gives up after [`super::Limits::retries`] tries in a
/// row that brought nothing; what is there stays, for the next call.
fn download(
    job: &mut Job,
    settings: &HubSettings,
    repo: &Repo,
    name: &str,
    meta: &Meta,
    before: u64,
    total: u64,
) -> Result<(), HubError> {
    let path = part_path(job, name);
    let part_of = PartOf { etag: meta.etag.clone(), bytes: meta.bytes };
    let part_of_path = part_of_path(job, name);
    let known = std::fs::read(&part_of_path).ok().and_then(|text| serde_json::from_slice::<PartOf>(&text).ok());
    if known.as_ref() != Some(&part_of) {
        let _ = std::fs::remove_file(&path);
        let text = serde_json::to_vec(&part_of).map_err(|e| HubError::new(Kind::Failed, e.to_string()))?;
        write_atomically(&part_of_path, &text).map_err(|e| HubError::io("cannot write", &part_of_path, e))?;
    }
    let failed = |e| HubError::io("cannot write", &path, e);
    let mut part = OpenOptions::new().create(true).truncate(false).write(true).open(&path).map_err(failed)?;
    let mut have = part.metadata().map_err(failed)?.len();
    if have > meta.bytes {
        part.set_len(0).map_err(failed)?;
        have = 0;
    }
    if have > 0 {
        job.note(format!("{name}: going on after {} of {} bytes", have, meta.bytes));
    }
    job.check_space(meta.bytes - have)?;

    let what = format!("fetching {name} from hf");
    let address = url(settings, repo, &meta.commit, name);
    let mut fruitless = 0;
    job.progress(&what, before + have, Some(total));
    while have < meta.bytes {
        let start = have;
        part.seek(SeekFrom::Start(have)).map_err(failed)?;
        let pieces = request(settings, &address, start);
        let why = loop {
            match receive(&pieces, settings.limits.stall, job.cancel) {
                Ok(Piece::Head { status, start: answered }) => match status {
                    206 if answered == Some(start) => {}
                    // The whole file although a rest was asked for, or a range that is not ours: from the beginning.
                    200 | 416 if start > 0 => {
                        job.note(format!("{name}: the server cannot resume; starting again"));
                        part.set_len(0).map_err(failed)?;
                        part.seek(SeekFrom::Start(0)).map_err(failed)?;
                        have = 0;
                        if status == 416 {
                            break "it refused the range".to_string();
                        }
                    }
                    200 => {}
                    500.. | 429 => break format!("HTTP {status}"),
                    _ => return Err(refused(settings, repo, name, status)),
                },
                Ok(Piece::Data(bytes)) => {
                    if have + bytes.len() as u64 > meta.bytes {
                        let _ = std::fs::remove_file(&path);
                        let why =
                            format!("the hub sends more than the {} bytes of {name} that it announced", meta.bytes);
                        return Err(HubError::new(Kind::WrongDigest, why));
                    }
                    part.write_all(&bytes).map_err(failed)?;
                    have += bytes.len() as u64;
                    job.progress(&what, before + have, Some(total));
                }
                Ok(Piece::Broken(why)) => break why,
                Err(Silence::Closed) => break "the connection was closed".to_string(),
                Err(Silence::TooLong) => break format!("nothing came for {:.0?}", settings.limits.stall),
                Err(Silence::Cancelled) => return Err(HubError::new(Kind::Cancelled, "cancelled")),
            }
        };
        if have >= meta.bytes {
            break;
        }
        fruitless = if have > start { 0 } else { fruitless + 1 };
        if fruitless >= settings.limits.retries {
            let why = format!("{} broke off after {have} of {} bytes of {name} ({why})", settings.endpoint, meta.bytes);
            return Err(HubError::new(Kind::Unreachable, why));
        }
        job.note(format!("{name}: broke off after {have} of {} bytes ({why}); going on", meta.bytes));
        job.sleep(settings.limits.retry_wait)?;
    }
    part.sync_all().map_err(failed)
}

enum Piece {
    /// `start` is that of a Content-Range.
    Head {
        status: u16,
        start: Option<u64>,
    },
    Data(Vec<u8>),
    Broken(String),
}

/// Asks for a file from `start` on a thread of its own. The thread only hands bytes over, so that one that is left behind
/// in a read can do no harm; it ends at the next byte or at the client's own limit.
fn request(settings: &HubSettings, address: &str, start: u64) -> Receiver<Piece> {
    let (sender, receiver) = sync_channel(8);
    let (settings, address) = (settings.clone(), address.to_string());
    std::thread::spawn(move || {
        if let Err(why) = transfer(&settings, &address, start, &sender) {
            let _ = sender.send(Piece::Broken(why));
        }
    });
    receiver
}

fn transfer(settings: &HubSettings, address: &str, start: u64, sender: &SyncSender<Piece>) -> Result<(), String> {
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(0)
        .timeout_connect(Some(settings.limits.probe))
        .timeout_recv_response(Some(settings.limits.stall))
        .timeout_per_read(Some(settings.limits.stall))
        .build()
        .into();
    let mut address = address.to_string();
    let mut redirects = 0;
    let response = loop {
        let mut get = headers(agent.get(&address), &address, settings);
        if start > 0 {
            get = get.header("Range", format!("bytes={start}-"));
        }
        let response = get.call().map_err(|e| e.to_string())?;
        let location = response.headers().get("location").and_then(|value| value.to_str().ok());
        match location {
            Some(location) if response.status().is_redirection() && redirects < 10 => {
                address = redirected(&address, location);
                redirects += 1;
            }
            _ => break response,
        }
    };
    let status = response.status().as_u16();
    let range = response.headers().get("content-range").and_then(|value| value.to_str().ok());
    let answered = range.and_then(|r| r.trim().strip_prefix("bytes ")?.split('-').next()?.parse().ok());
    if sender.send(Piece::Head { status, start: answered }).is_err() || !matches!(status, 200 | 206) {
        return Ok(());
    }
    let mut body = response.into_body().into_reader();
    let mut buffer = vec![0u8; 1 << 18];
    loop {
        match body.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(n) if sender.send(Piece::Data(buffer[..n].to_vec())).is_err() => return Ok(()),
            Ok(_) => {}
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e.to_string()),
        }
    }
}

enum Silence {
    Closed,
    TooLong,
    Cancelled,
}

/// Waits for the next item, at most `limit`, and notices a cancellation within a twentieth of a second.
fn receive<T>(receiver: &Receiver<T>, limit: Duration, cancel: &CancellationToken) -> Result<T, Silence> {
    let deadline = Instant::now() + limit;
    loop {
        if cancel.is_cancelled() {
            return Err(Silence::Cancelled);
        }
        let rest = deadline.saturating_duration_since(Instant::now());
        match receiver.recv_timeout(rest.min(Duration::from_millis(50))) {
            Ok(item) => return Ok(item),
            Err(RecvTimeoutError::Disconnected) => return Err(Silence::Closed),
            Err(RecvTimeoutError::Timeout) if rest.is_zero() => return Err(Silence::TooLong),
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_lead_where_they_say() {
        let check = |location: &str, expected: &str| {
            assert_eq!(redirected("https://hub.co:8080/a/b/c?d=/e", location), expected, "{location}");
        };
        check("https://cdn.co/x?y=https://z", "https://cdn.co/x?y=https://z");
        check("//cdn.co/x", "https://cdn.co/x");
        check("/x?next=http://z", "https://hub.co:8080/x?next=http://z");
        check("x", "https://hub.co:8080/a/b/x");
        let same = |a: &str, b: &str| origin(a) == origin(b);
        assert!(same("http://h:1/a", "http://h:1?q"));
        assert!(!same("http://h:1/a", "http://h:2/a") && !same("http://h/", "https://h/"));
        assert!(!same("https://hub.co/x", "https://hub.co.evil/x"));
    }
}
