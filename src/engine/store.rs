//! The prefix store on disk: keys and values of pinned prefixes, for the next process.
//!
//! One file a prefix, `FINGERPRINT-IDS.kv`, written beside its place and renamed into it, never changed afterwards, and mapped in when
//! a prompt begins with its ids. What is found is confirmed by comparing ids, and every byte by a checksum: a damaged,
//! truncated or foreign file is a miss with a note. No logits are stored.
//!
//! The file, little-endian: `"cobkv\0\0\x01"`, then a checksum of all that follows up to the blocks, the length of that part, the
//! fingerprint (32 bytes), layers, KV heads, head dimension, bytes of an element, tokens (u32 each), the ids (u32), a checksum for
//! each block (u64), zeros up to a multiple of 4,096, and the blocks as they are in memory ([`crate::model::kv`];
//! a device's KV is written row by row, under a fingerprint of its own).

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use memmap2::Mmap;
use twox_hash::XxHash3_64;

use crate::model::kv::{BLOCK, KvShape, KvType};
use crate::model::{Kv, candle_error};

const MAGIC: [u8; 8] = *b"cobkv\0\0\x01";
/// Magic, checksum of the header, its length.
const FIXED: usize = 8 + 8 + 4;
const ALIGNMENT: usize = 4096;
/// Of a header: about four million tokens.
const LENGTH_MAX: usize = 16 << 20;
const SUFFIX: &str = "kv";
/// A file that a process began and did not rename; after this long nobody writes it any more.
const STALE: Duration = Duration::from_secs(3600);

/// Where prefixes are kept, and for whom.
#[derive(Clone, Debug)]
pub struct StoreSettings {
    pub dir: PathBuf,
    /// Of everything that keys and values depend on: model file, tokenizer, template, KV type, kernel tier.
    pub fingerprint: [u8; 32],
    /// Of all files in the folder together; the least recently used go first.
    pub bytes_max: u64,
    /// A shorter prefix is computed faster than a file is looked after.
    pub tokens_min: usize,
}

/// One file of the store, as far as its header tells.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Entry {
    pub path: PathBuf,
    /// In hexadecimal.
    pub fingerprint: String,
    pub tokens: usize,
    pub bytes: u64,
    /// Seconds since the file was last used.
    pub unused_s: u64,
}

/// The store of one model, for one process.
pub struct PrefixStore {
    settings: StoreSettings,
    /// What must be said, until someone takes it.
    notes: Vec<String>,
    /// Files that turned out to be unusable: each is said once.
    bad: Vec<PathBuf>,
    writer: Option<Writer>,
    /// What could not be written; it is not tried again.
    failed: Vec<PathBuf>,
}

/// A file that is being written.
struct Writer {
    path: PathBuf,
    /// What went wrong.
    thread: std::thread::JoinHandle<Option<String>>,
}

impl PrefixStore {
    pub fn new(settings: StoreSettings) -> Self {
        PrefixStore { settings, notes: Vec::new(), bad: Vec::new(), writer: None, failed: Vec::new() }
    }

    /// Something to be said with the next report.
    pub fn note(&mut self, note: String) {
        self.notes.push(note);
    }

    pub fn take_notes(&mut self) -> Vec<String> {
        if self.writer.as_ref().is_some_and(|writer| writer.thread.is_finished()) {
            self.finish();
        }
        std::mem::take(&mut self.notes)
    }

    /// The longest stored prefix of `ids`, at most `limit` tokens of it, if it is longer than `known` by enough to be worth it.
    /// Costs a look at the headers in the folder and, for a hit, one pass over the file.
    pub fn lookup(&mut self, shape: KvShape, ids: &[u32], limit: usize, known: usize) -> Option<Kv> {
        if limit < known + self.settings.tokens_min {
            return None;
        }
        let worth_it = known + self.settings.tokens_min;
        let common = |header: &Header| header.ids.iter().zip(ids).take_while(|(a, b)| a == b).count().min(limit);
        let mut candidates: Vec<(usize, PathBuf)> = Vec::new();
        for path in files(&self.settings.dir).unwrap_or_default() {
            if !self.is_ours(&path) || self.bad.contains(&path) {
                continue;
            }
            match Header::open(&path) {
                Ok((header, _)) => candidates.push((common(&header), path)),
                // Another process may just have thrown it out.
                Err(fault) if fault.is_absence() => {}
                Err(fault) => self.give_up(path, &fault),
            }
        }
        candidates.retain(|(common, _)| *common >= worth_it);
        candidates.sort_by(|a, b| b.cmp(a));
        for (_, path) in candidates {
            match open(&path, &self.settings.fingerprint, shape) {
                // Another process may have put another file into its place.
                Ok((header, _)) if common(&header) < worth_it => {}
                Ok((header, mut kv)) => {
                    touch(&path);
                    kv.truncate(common(&header));
                    return Some(kv);
                }
                Err(fault) if fault.is_absence() => {}
                Err(fault) => self.give_up(path, &fault),
            }
        }
        None
    }

    /// Keeps `kv`, which holds exactly `ids`, unless it is there already. The file is written by a thread of its own; the next
    /// call waits for it.
    pub fn save(&mut self, ids: &[u32], kv: Kv) {
        assert_eq!(ids.len(), kv.len(), "the KV is of other tokens");
        if ids.len() < self.settings.tokens_min {
            return;
        }
        let path = self.path(ids);
        let is_being_written = self.writer.as_ref().is_some_and(|writer| writer.path == path);
        if is_being_written || self.failed.contains(&path) {
            return;
        }
        if path.exists() && !self.bad.contains(&path) {
            return touch(&path);
        }
        self.finish();
        self.bad.retain(|bad| *bad != path);
        let kv = match kv.to_host() {
            Ok(kv) => kv,
            Err(error) => {
                let why = candle_error(&error);
                return self
                    .notes
                    .push(format!("the prefix is not kept on disk: it cannot be read from the device: {why}"));
            }
        };
        let (settings, ids, to) = (self.settings.clone(), ids.to_vec(), path.clone());
        let write = move || match write(&to, &settings, &ids, &kv) {
            Ok(()) => None,
            Err(error) => Some(format!("the prefix is not kept on disk: {}: {error}", to.display())),
        };
        match std::thread::Builder::new().name("cob-store".into()).spawn(write) {
            Ok(thread) => self.writer = Some(Writer { path, thread }),
            Err(error) => self.notes.push(format!("the prefix is not kept on disk: no thread can be started: {error}")),
        }
    }

    /// Waits for what is being written.
    pub fn finish(&mut self) {
        if let Some(writer) = self.writer.take() {
            let panicked = || Some("the thread that keeps prefixes on disk panicked".into());
            if let Some(note) = writer.thread.join().unwrap_or_else(|_| panicked()) {
                self.notes.push(note);
                self.failed.push(writer.path);
            }
        }
    }

    fn give_up(&mut self, path: PathBuf, fault: &Fault) {
        self.notes.push(format!(
            "the kept prefix {} is not used: {fault}; it is computed again. `cob cache verify` looks at all of them",
            path.display()
        ));
        self.bad.push(path);
    }

    fn is_ours(&self, path: &Path) -> bool {
        let name = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        name.split_once('-').is_some_and(|(start, _)| start == short(&self.settings.fingerprint))
    }

    fn path(&self, ids: &[u32]) -> PathBuf {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let name = format!("{}-{:016x}.{SUFFIX}", short(&self.settings.fingerprint), XxHash3_64::oneshot(&bytes));
        self.settings.dir.join(name)
    }
}

impl Drop for PrefixStore {
    fn drop(&mut self) {
        self.finish();
        for note in self.take_notes() {
            tracing::warn!("{note}");
        }
    }
}

/// The clock of the store: the least recently used goes first.
fn touch(path: &Path) {
    let _ = File::options().append(true).open(path).and_then(|file| file.set_modified(SystemTime::now()));
}

/// What of a fingerprint stands in a file's name.
fn short(fingerprint: &[u8; 32]) -> String {
    hex(&fingerprint[..8])
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The files of the store, in no order. A folder that is not there has none.
fn files(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let paths = entries.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<_>>>()?;
    Ok(paths.into_iter().filter(|path| path.extension().is_some_and(|end| end == SUFFIX)).collect())
}

/// Why a file cannot be used.
#[derive(Debug)]
enum Fault {
    Io(io::Error),
    Damaged(String),
    /// It is whole, and of something else.
    Foreign(&'static str),
}

impl Fault {
    fn is_absence(&self) -> bool {
        matches!(self, Fault::Io(error) if error.kind() == io::ErrorKind::NotFound)
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Fault::Io(error) => write!(f, "it cannot be read: {error}"),
            Fault::Damaged(why) => write!(f, "it is damaged ({why})"),
            Fault::Foreign(what) => write!(f, "it is of another {what}"),
        }
    }
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Fault::Io(error)
    }
}

struct Header {
    fingerprint: [u8; 32],
    shape: KvShape,
    ids: Vec<u32>,
    /// Of each block.
    sums: Vec<u64>,
    /// Where the blocks begin.
    len: usize,
}

impl Header {
    fn new(fingerprint: [u8; 32], shape: KvShape, ids: &[u32], sums: Vec<u64>) -> Self {
        let len = (FIXED + 32 + 5 * 4 + ids.len() * 4 + sums.len() * 8).next_multiple_of(ALIGNMENT);
        Header { fingerprint, shape, ids: ids.to_vec(), sums, len }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(self.len);
        body.extend((self.len as u32).to_le_bytes());
        body.extend(self.fingerprint);
        let KvShape { layers, kv_heads, head_dim, kind } = self.shape;
        for number in [layers, kv_heads, head_dim, kind_number(kind), self.ids.len()] {
            body.extend((number as u32).to_le_bytes());
        }
        self.ids.iter().for_each(|id| body.extend(id.to_le_bytes()));
        self.sums.iter().for_each(|sum| body.extend(sum.to_le_bytes()));
        body.resize(self.len - 16, 0);
        let mut bytes = MAGIC.to_vec();
        bytes.extend(XxHash3_64::oneshot(&body).to_le_bytes());
        bytes.extend(body);
        bytes
    }

    /// Reads and checks all but the blocks; the length of the file is compared with what the header says.
    fn open(path: &Path) -> Result<(Header, File), Fault> {
        let damaged = |why: &str| Fault::Damaged(why.to_owned());
        // Opening a pipe would wait for whoever writes into it.
        if !fs::metadata(path)?.is_file() {
            return Err(Fault::Io(io::Error::other("it is no regular file")));
        }
        let mut file = File::open(path)?;
        let bytes_total = file.metadata()?.len();
        let mut fixed = [0u8; FIXED];
        read_exact(&mut file, &mut fixed)?;
        if fixed[..8] != MAGIC {
            return Err(damaged("it does not begin as a file of this version does"));
        }
        let sum = u64::from_le_bytes(fixed[8..16].try_into().expect("eight bytes"));
        let len = u32::from_le_bytes(fixed[16..20].try_into().expect("four bytes")) as usize;
        if !len.is_multiple_of(ALIGNMENT) || len as u64 > bytes_total || !(FIXED + 32 + 20..=LENGTH_MAX).contains(&len)
        {
            return Err(damaged("its header has no such length"));
        }
        let mut body = vec![0u8; len - 16];
        body[..4].copy_from_slice(&fixed[16..]);
        read_exact(&mut file, &mut body[4..])?;
        if XxHash3_64::oneshot(&body) != sum {
            return Err(damaged("the checksum of its header"));
        }
        // Behind the checksum everything is as it was written, by whomever.
        let word = |i: usize| u32::from_le_bytes(body[36 + 4 * i..40 + 4 * i].try_into().expect("four bytes")) as usize;
        let kind = match word(3) {
            1 => KvType::Q8_0,
            2 => KvType::F16,
            4 => KvType::F32,
            _ => return Err(Fault::Foreign("version")),
        };
        let shape = KvShape { layers: word(0), kv_heads: word(1), head_dim: word(2), kind };
        let tokens = word(4);
        let blocks = tokens.div_ceil(BLOCK);
        let (ids_at, sums_at) = (56, 56 + tokens * 4);
        if body.len() < sums_at + blocks * 8 {
            return Err(damaged("its header is too short"));
        }
        let ids = body[ids_at..sums_at].chunks_exact(4);
        let ids = ids.map(|b| u32::from_le_bytes(b.try_into().expect("four bytes"))).collect();
        let sums = body[sums_at..sums_at + blocks * 8].chunks_exact(8);
        let sums = sums.map(|b| u64::from_le_bytes(b.try_into().expect("eight bytes"))).collect();
        if shape_is_absurd(&shape) || bytes_total != len as u64 + (blocks * shape.block_bytes()) as u64 {
            return Err(damaged("its length"));
        }
        let fingerprint = body[4..36].try_into().expect("32 bytes");
        Ok((Header { fingerprint, shape, ids, sums, len }, file))
    }
}

/// Whether the bytes of its blocks might overflow.
fn shape_is_absurd(shape: &KvShape) -> bool {
    [shape.layers, shape.kv_heads, shape.head_dim].iter().any(|&n| n > 1 << 12)
}

fn read_exact(file: &mut File, bytes: &mut [u8]) -> Result<(), Fault> {
    io::Read::read_exact(file, bytes).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => Fault::Damaged("it ends early".into()),
        _ => Fault::Io(error),
    })
}

/// Maps a file and checks every block of it.
fn open(path: &Path, fingerprint: &[u8; 32], shape: KvShape) -> Result<(Header, Kv), Fault> {
    let (header, file) = Header::open(path)?;
    if header.fingerprint != *fingerprint {
        return Err(Fault::Foreign("model, tokenizer, template, KV type or kernel tier"));
    }
    if header.shape != shape {
        return Err(Fault::Foreign("shape"));
    }
    let map = mapped(&file, &header)?;
    check_blocks(&map, &header)?;
    let kv = Kv::mapped(shape, header.ids.len(), Arc::new(map), header.len);
    Ok((header, kv))
}

fn mapped(file: &File, header: &Header) -> Result<Mmap, Fault> {
    // SAFETY: files of the store are replaced and removed, never written again. Whoever does so all the same from outside can make
    // this process read other numbers, or end it with SIGBUS, and could as well have changed the model.
    let map = unsafe { Mmap::map(file)? };
    let expected = header.len + header.sums.len() * header.shape.block_bytes();
    if map.len() != expected { Err(Fault::Damaged("its length".into())) } else { Ok(map) }
}

/// On two threads: a large prefix is more than a hundred megabytes.
fn check_blocks(map: &[u8], header: &Header) -> Result<(), Fault> {
    let size = header.shape.block_bytes();
    let blocks: Vec<(&[u8], u64)> =
        map[header.len..].chunks_exact(size.max(1)).zip(header.sums.iter().copied()).collect();
    let first_wrong = |part: &[(&[u8], u64)]| part.iter().position(|(block, sum)| XxHash3_64::oneshot(block) != *sum);
    let half = blocks.len() / 2;
    let (front, back) = blocks.split_at(half);
    let (a, b) = std::thread::scope(|scope| {
        match std::thread::Builder::new().spawn_scoped(scope, || first_wrong(front)) {
            Ok(other) => {
                let b = first_wrong(back);
                (other.join().unwrap_or(Some(0)), b)
            }
            // Where no thread can be had it takes twice as long.
            Err(_) => (first_wrong(front), first_wrong(back)),
        }
    });
    match a.or(b.map(|at| at + half)) {
        None => Ok(()),
        Some(at) => Err(Fault::Damaged(format!("the checksum of block {at}"))),
    }
}

/// Writes a file beside its place and renames it, then makes room.
fn write(path: &Path, settings: &StoreSettings, ids: &[u32], kv: &Kv) -> io::Result<()> {
    let blocks = kv.block_bytes();
    let sums = blocks.iter().map(|block| XxHash3_64::oneshot(block)).collect();
    let header = Header::new(settings.fingerprint, *kv.shape(), ids, sums).bytes();
    let bytes = header.len() as u64 + blocks.iter().map(|block| block.len() as u64).sum::<u64>();
    if bytes > settings.bytes_max {
        return Err(io::Error::other(format!(
            "it takes {bytes} bytes, and all of them may take {}",
            settings.bytes_max
        )));
    }
    let mut folder = fs::DirBuilder::new();
    folder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut folder, 0o700);
    folder.create(&settings.dir)?;
    make_room(&settings.dir, settings.bytes_max - bytes, Some(path))?;
    // Readable by its owner only, as what it was computed from may be private.
    let mut file = tempfile::Builder::new().prefix(".writing-").tempfile_in(&settings.dir)?;
    file.write_all(&header)?;
    for block in blocks {
        file.write_all(block)?;
    }
    file.persist(path).map_err(|error| error.error)?;
    // Other processes may have written in the meantime.
    make_room(&settings.dir, settings.bytes_max, None)
}

/// Removes the least recently used files until the rest takes no more than `bytes_max`, and what a dead process left half written.
/// `but`: a file that is about to be replaced and does not count.
///
/// # Errors
/// A file that cannot be removed, if there is no room without that.
fn make_room(dir: &Path, bytes_max: u64, but: Option<&Path>) -> io::Result<()> {
    for entry in fs::read_dir(dir)?.flatten().filter(is_left_over) {
        let _ = fs::remove_file(entry.path());
    }
    let mut kept: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
    for path in files(dir)? {
        if let Ok(meta) = fs::metadata(&path)
            && meta.is_file()
            && Some(path.as_path()) != but
        {
            kept.push((meta.modified().unwrap_or(SystemTime::UNIX_EPOCH), meta.len(), path));
        }
    }
    kept.sort();
    let mut bytes: u64 = kept.iter().map(|(_, bytes, _)| bytes).sum();
    let mut failure = Ok(());
    for (_, size, path) in kept {
        if bytes <= bytes_max {
            return Ok(());
        }
        // A process that has it mapped keeps what it has.
        match remove(&path) {
            Ok(()) => bytes -= size,
            Err(error) => failure = Err(error),
        }
    }
    if bytes <= bytes_max { Ok(()) } else { failure }
}

/// Whether nobody writes this unfinished file any more.
fn is_left_over(entry: &fs::DirEntry) -> bool {
    let age = entry.metadata().and_then(|meta| meta.modified()).ok().and_then(|time| time.elapsed().ok());
    entry.file_name().to_string_lossy().starts_with(".writing-") && age.is_some_and(|age| age > STALE)
}

/// It may be gone already: another process makes room too.
fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// A file that cannot be used, and why.
pub type Unusable = (PathBuf, String);

/// The files of a store, the most recently used first, and those that cannot be used.
pub fn list(dir: &Path) -> io::Result<(Vec<Entry>, Vec<Unusable>)> {
    let (mut entries, mut bad) = (Vec::new(), Vec::new());
    for path in files(dir)? {
        let header = match Header::open(&path) {
            Ok((header, _)) => header,
            Err(fault) if fault.is_absence() => continue,
            Err(fault) => {
                bad.push((path, fault.to_string()));
                continue;
            }
        };
        let Ok(meta) = fs::metadata(&path) else { continue };
        let unused = meta.modified().ok().and_then(|time| time.elapsed().ok()).unwrap_or_default();
        entries.push(Entry {
            fingerprint: hex(&header.fingerprint),
            tokens: header.ids.len(),
            bytes: meta.len(),
            unused_s: unused.as_secs(),
            path,
        });
    }
    entries.sort_by(|a, b| (a.unused_s, &a.path).cmp(&(b.unused_s, &b.path)));
    bad.sort();
    Ok((entries, bad))
}

/// Checks every byte of a file of the store.
///
/// # Errors
/// What is wrong with it.
pub fn verify(path: &Path) -> Result<(), String> {
    let check = || {
        let (header, file) = Header::open(path)?;
        check_blocks(&mapped(&file, &header)?, &header)
    };
    check().map_err(|fault| fault.to_string())
}

/// Removes all files of a store, also those that dead processes left unfinished; how many, and their bytes.
pub fn clear(dir: &Path) -> io::Result<(usize, u64)> {
    let (mut count, mut bytes) = (0, 0);
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((0, 0)),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let entry = entry?;
        let path = entry.path();
        if path.extension().is_some_and(|end| end == SUFFIX) || is_left_over(&entry) {
            bytes += entry.metadata().map_or(0, |meta| meta.len());
            remove(&path)?;
            count += 1;
        }
    }
    Ok((count, bytes))
}

/// The type in a file's header: the whole bytes of an element.
fn kind_number(kind: KvType) -> usize {
    match kind {
        KvType::Q8_0 => 1,
        KvType::F16 => 2,
        KvType::F32 => 4,
    }
}
