//! The file: create, append, open again, read.

use std::fmt;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::event::{Event, FORMAT, LineFault, Record, RunInfo, parse_line};
use super::id;
use crate::message::{StopReason, ToolCall, ToolResult};

/// Why a session cannot be used.
#[derive(Debug)]
pub enum SessionError {
    InvalidId(String),
    NotFound(PathBuf),
    /// A folder, a pipe …
    NotAFile(PathBuf),
    /// What was given fits several ids.
    Ambiguous(String),
    /// Another process has it open.
    Locked(PathBuf),
    /// It was written by a newer version, or holds an event that this one does not know and may not skip.
    Refused(String),
    /// `line` counts from 1.
    Corrupt {
        path: PathBuf,
        line: usize,
        why: String,
    },
    Io {
        path: PathBuf,
        doing: &'static str,
        error: io::Error,
    },
}

impl fmt::Display for SessionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SessionError::InvalidId(id) => {
                write!(f, "`{id}` cannot be a session id (letters, digits, `-` and `_`); `cob session list` shows them")
            }
            SessionError::NotFound(path) => {
                write!(f, "there is no session at {}; `cob session list` shows them", path.display())
            }
            SessionError::NotAFile(path) => write!(
                f,
                "the session {} is not a regular file; move it out of the folder of the sessions",
                path.display()
            ),
            SessionError::Locked(path) => write!(
                f,
                "the session {} is open in another process; wait until it ends, or start a new one without --resume",
                path.display()
            ),
            SessionError::Refused(why) | SessionError::Ambiguous(why) => f.write_str(why),
            SessionError::Corrupt { path, line, why } => write!(
                f,
                "the session {} is damaged in line {line}: {why}; cut the file before that line to go on from there, or \
                 start a new session",
                path.display()
            ),
            SessionError::Io { path, doing, error } => {
                write!(f, "cannot {doing} the session {}: {error}", path.display())?;
                let exists = ![CREATE, MAKE_FOLDER].contains(doing);
                match error.kind() {
                    io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded if exists => {
                        f.write_str("; free some space and resume it")
                    }
                    io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                        f.write_str("; free some space, or set COB_HOME to a folder on another disk")
                    }
                    io::ErrorKind::FileTooLarge => f.write_str("; raise the limit on the size of files (ulimit -f)"),
                    io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                        f.write_str("; check the rights of the folder, or set COB_HOME to one that can be written")
                    }
                    io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
                        match path.ancestors().find(|part| part.exists() && !part.is_dir()) {
                            Some(part) => write!(
                                f,
                                "; {} is not a folder: move it away, or set COB_HOME to another one",
                                part.display()
                            ),
                            None => Ok(()),
                        }
                    }
                    _ => Ok(()),
                }
            }
        }
    }
}

impl std::error::Error for SessionError {}

/// What is done to a session that is not there yet.
const CREATE: &str = "create";
const MAKE_FOLDER: &str = "make the folder of";

fn io_error(path: &Path, doing: &'static str) -> impl Fn(io::Error) -> SessionError {
    move |error| SessionError::Io { path: path.to_owned(), doing, error }
}

/// Where the session `id` of the folder `dir` lies. The file need not exist.
pub fn path(dir: &Path, id: &str) -> Result<PathBuf, SessionError> {
    if !id::is_valid(id) {
        return Err(SessionError::InvalidId(id.to_owned()));
    }
    Ok(dir.join(format!("{id}.jsonl")))
}

/// The id of the session that `text` names: an id, or the beginning or the end of just one.
pub fn find(dir: &Path, text: &str) -> Result<String, SessionError> {
    let exact = path(dir, text)?;
    if exact.exists() {
        return Ok(text.to_owned());
    }
    let mut near: Vec<String> = ids(dir)?;
    near.retain(|id| id.starts_with(text) || id.ends_with(text));
    near.sort();
    match near.as_slice() {
        [id] => Ok(id.clone()),
        [] => Err(SessionError::NotFound(exact)),
        [first, second, rest @ ..] => Err(SessionError::Ambiguous(format!(
            "`{text}` fits {} sessions ({first}, {second}{}); give more of the id",
            near.len(),
            if rest.is_empty() { "" } else { ", …" }
        ))),
    }
}

/// The id of the newest session that works in the folder `cwd`, where there is one that can be read.
pub fn latest(dir: &Path, cwd: &Path) -> Result<Option<String>, SessionError> {
    let mut ids = ids(dir)?;
    // By the time of the last event, not of the first: what was resumed is newer than what began since.
    ids.sort_by_cached_key(|id| std::cmp::Reverse(path(dir, id).and_then(|path| modified(&path)).ok()));
    let works_here = |id: &String| {
        let log = path(dir, id).and_then(|path| read(&path));
        log.is_ok_and(|log| log.run().is_some_and(|run| Path::new(&run.cwd) == cwd))
    };
    Ok(ids.into_iter().find(works_here))
}

fn modified(path: &Path) -> Result<SystemTime, SessionError> {
    fs::metadata(path).and_then(|meta| meta.modified()).map_err(io_error(path, "look at"))
}

/// The names of the sessions' files, in no order.
fn ids(dir: &Path) -> Result<Vec<String>, SessionError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(io_error(dir, "list the folder of")(error)),
    };
    let mut ids = Vec::new();
    for entry in entries {
        let path = entry.map_err(io_error(dir, "list the folder of"))?.path();
        let id = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        if path.extension().is_some_and(|ext| ext == "jsonl") && id::is_valid(id) {
            ids.push(id.to_owned());
        }
    }
    Ok(ids)
}

/// What a file holds.
#[derive(Debug)]
pub struct Log {
    pub records: Vec<Record>,
    /// The number of the next line; more than `records.len()` where optional events of a newer version were skipped.
    pub next_seq: u64,
    /// Events that are unknown here and marked optional.
    pub skipped: usize,
    /// The length of the complete lines.
    pub good_bytes: u64,
    /// The length of what follows them without a line end: half a line that a crash, or a writer just now, left.
    pub torn_bytes: u64,
}

impl Log {
    /// With what the session runs, by the latest `init` or `resumed`.
    pub fn run(&self) -> Option<&RunInfo> {
        run_of(&self.records)
    }
}

fn run_of(records: &[Record]) -> Option<&RunInfo> {
    records.iter().rev().find_map(|record| match &record.event {
        Event::Init { run, .. } | Event::Resumed { run } => Some(run),
        _ => None,
    })
}

/// Reads the file of a session and changes nothing. It may belong to a live session.
pub fn read(path: &Path) -> Result<Log, SessionError> {
    let mut file = open_file(path, OpenOptions::new().read(true))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(io_error(path, "read"))?;
    parse(path, &bytes)
}

/// Only what is a regular file is opened: a pipe would wait for whoever writes to it.
fn open_file(path: &Path, options: &OpenOptions) -> Result<File, SessionError> {
    let fault = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => SessionError::NotFound(path.to_owned()),
        _ => io_error(path, "open")(error),
    };
    if !fs::metadata(path).map_err(fault)?.is_file() {
        return Err(SessionError::NotAFile(path.to_owned()));
    }
    options.open(path).map_err(fault)
}

fn parse(path: &Path, bytes: &[u8]) -> Result<Log, SessionError> {
    let good = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
    let mut log = Log {
        records: Vec::new(),
        next_seq: 0,
        skipped: 0,
        good_bytes: good as u64,
        torn_bytes: (bytes.len() - good) as u64,
    };
    for (index, line) in bytes[..good].split_inclusive(|&b| b == b'\n').enumerate() {
        let number = index + 1;
        match parse_line(&line[..line.len() - 1], index as u64) {
            Ok(Some(record)) => log.records.push(record),
            Ok(None) => log.skipped += 1,
            Err(LineFault::Corrupt(why)) => {
                return Err(SessionError::Corrupt { path: path.to_owned(), line: number, why });
            }
            Err(LineFault::Newer(v)) => {
                return Err(SessionError::Refused(format!(
                    "the session {} has format {v}; this version of cob reads up to {FORMAT}. Use a newer one",
                    path.display()
                )));
            }
            Err(LineFault::UnknownEvent(kind)) => {
                return Err(SessionError::Refused(format!(
                    "the session {} holds a `{kind}` event (line {number}), which this version of cob does not know and \
                     may not skip. Use a newer one",
                    path.display()
                )));
            }
        }
        log.next_seq += 1;
    }
    Ok(log)
}

/// The calls that have no result, in order, and whether they were started. Only a process that ended in the middle of
/// a step leaves any.
pub fn unanswered<'a>(events: impl IntoIterator<Item = &'a Event>) -> Vec<(ToolCall, bool)> {
    let mut open: Vec<(ToolCall, bool)> = Vec::new();
    for event in events {
        match event {
            Event::Assistant { message, .. } => open.extend(message.calls.iter().map(|call| (call.clone(), false))),
            Event::ToolStarted { call_id } => {
                open.iter_mut().filter(|(call, _)| call.id == *call_id).for_each(|(_, started)| *started = true);
            }
            Event::ToolResult { result, .. } => open.retain(|(call, _)| call.id != result.call_id),
            _ => {}
        }
    }
    open
}

/// A session that this process writes. The lock lasts as long as the value.
#[derive(Debug)]
pub struct Session {
    id: String,
    path: PathBuf,
    file: File,
    len: u64,
    next_seq: u64,
    records: Vec<Record>,
    /// An append failed: the log no longer says what happens, so nothing more may happen.
    broken: bool,
}

impl Session {
    /// Starts a session in the folder `dir`, which is made where it is missing. The file can be read by its owner only.
    pub fn create(dir: &Path, run: RunInfo) -> Result<Session, SessionError> {
        create_private_dir(dir).map_err(io_error(dir, MAKE_FOLDER))?;
        let (id, path, file) = loop {
            let id = id::new_id(now_ms());
            let path = path(dir, &id)?;
            let mut options = OpenOptions::new();
            options.create_new(true).append(true);
            owner_only(&mut options);
            match options.open(&path) {
                Ok(file) => break (id, path, file),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(io_error(&path, CREATE)(error)),
            }
        };
        lock(&file, &path)?;
        let mut session =
            Session { id: id.clone(), path, file, len: 0, next_seq: 0, records: Vec::new(), broken: false };
        let begun = session.append(Event::Init { session_id: id, run }).map(|_| ());
        if let Err(error) = begun.and_then(|()| session.sync()) {
            // Without its first event it is no session, and nobody could resume it.
            let _ = fs::remove_file(&session.path);
            return Err(match error {
                SessionError::Io { path, error, .. } => SessionError::Io { path, doing: CREATE, error },
                other => other,
            });
        }
        // The name of a new file is durable only once its folder is.
        File::open(dir).and_then(|folder| folder.sync_all()).map_err(io_error(dir, "sync the folder of"))?;
        Ok(session)
    }

    /// Opens a session again: locks it, cuts off a torn last line, and gives every call without a result one that says
    /// that it was interrupted. The strings say what was done; each is in the log too.
    /// Call [`Session::resumed`] once the model is there.
    pub fn open(dir: &Path, id: &str) -> Result<(Session, Vec<String>), SessionError> {
        let path = path(dir, id)?;
        let mut file = open_file(&path, OpenOptions::new().read(true).append(true))?;
        lock(&file, &path)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(io_error(&path, "read"))?;
        let log = parse(&path, &bytes)?;
        if log.records.is_empty() {
            return Err(SessionError::Corrupt { path, line: 1, why: "it holds no complete event".into() });
        }
        file.set_len(log.good_bytes).map_err(io_error(&path, "cut the torn last line of"))?;
        let mut session = Session {
            id: id.to_owned(),
            path,
            file,
            len: log.good_bytes,
            next_seq: log.next_seq,
            records: log.records,
            broken: false,
        };
        let mut said = Vec::new();
        if log.torn_bytes > 0 {
            said.push(format!("the last line of the session was torn ({} bytes) and was cut off", log.torn_bytes));
        }
        if log.skipped > 0 {
            said.push(format!("{} optional events of a newer version were skipped", log.skipped));
        }
        for text in &said {
            session.append(Event::Note { text: text.clone() })?;
        }
        said.extend(session.answer_interrupted()?);
        session.sync()?;
        Ok((session, said))
    }

    fn answer_interrupted(&mut self) -> Result<Vec<String>, SessionError> {
        let mut said = Vec::new();
        for (call, started) in unanswered(self.events()) {
            said.push(match started {
                true => format!(
                    "{} ({}) was interrupted and may have run; it is not run again by itself",
                    call.name, call.id
                ),
                false => format!("{} ({}) was interrupted before it ran; it is not run by itself", call.name, call.id),
            });
            self.append(Event::ToolResult { result: interrupted(&call, started), duration_ms: 0 })?;
        }
        Ok(said)
    }

    /// Notes with what the session goes on; the strings say what differs from before.
    pub fn resumed(&mut self, run: RunInfo) -> Result<Vec<String>, SessionError> {
        let before = self.run().model.clone();
        let mut said = Vec::new();
        if (&before.id, &before.digest) != (&run.model.id, &run.model.digest) {
            said.push(format!(
                "the session was written with the model {}, and goes on with {}",
                before.id, run.model.id
            ));
            self.append(Event::ModelChanged { from: before, to: run.model.clone() })?;
        }
        self.append(Event::Resumed { run })?;
        self.sync()?;
        Ok(said)
    }

    /// Adds one event. After an error the log is as it was before, and every further append fails too.
    pub fn append(&mut self, event: Event) -> Result<&Record, SessionError> {
        if self.broken {
            let error = io::Error::other("an earlier write failed");
            return Err(io_error(&self.path, "write")(error));
        }
        let record = Record { v: FORMAT, seq: self.next_seq, time_ms: now_ms(), event };
        let written = serde_json::to_vec(&record).map_err(io::Error::from).and_then(|mut line| {
            line.push(b'\n');
            self.file.write_all(&line).map(|()| line.len() as u64)
        });
        match written {
            Ok(bytes) => {
                self.len += bytes;
                self.next_seq += 1;
                self.records.push(record);
                Ok(&self.records[self.records.len() - 1])
            }
            Err(error) => {
                self.broken = true;
                // Best effort: half a line that stays is cut off at the next open.
                let _ = self.file.set_len(self.len);
                Err(io_error(&self.path, "write")(error))
            }
        }
    }

    /// Waits until everything appended is on the disk.
    pub fn sync(&mut self) -> Result<(), SessionError> {
        self.file.sync_data().map_err(|error| {
            self.broken = true;
            io_error(&self.path, "sync")(error)
        })
    }

    pub fn id(&self) -> &str {
        &self.id
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn records(&self) -> &[Record] {
        &self.records
    }

    pub fn events(&self) -> impl DoubleEndedIterator<Item = &Event> {
        self.records.iter().map(|record| &record.event)
    }

    /// The calls made so far; the next one gets this number in its id.
    pub fn call_count(&self) -> usize {
        let calls = self.events().map(|event| match event {
            Event::Assistant { message, .. } => message.calls.len(),
            _ => 0,
        });
        calls.sum()
    }

    #[cfg(test)]
    pub(super) fn replace_file(&mut self, file: File) -> File {
        std::mem::replace(&mut self.file, file)
    }

    /// With what the session runs, by the latest `init` or `resumed`.
    pub fn run(&self) -> &RunInfo {
        run_of(&self.records).expect("a session begins with `init`")
    }

    /// Whether the last task has no answer yet, not even one that was cut off, so that the session can go on without a
    /// new one.
    pub fn is_unfinished(&self) -> bool {
        let last = self.events().rev().find_map(|event| match event {
            Event::User { .. } | Event::ToolResult { .. } => Some(true),
            Event::Assistant { message, .. } => Some(!message.calls.is_empty()),
            _ => None,
        });
        last.unwrap_or(false)
    }
}

fn interrupted(call: &ToolCall, started: bool) -> ToolResult {
    let text = match started {
        true => {
            "interrupted, may have run: the program ended while this call was running. Check what it did before you make \
             the call again."
        }
        false => "interrupted before it ran. Make the call again if it is still needed.",
    };
    ToolResult {
        call_id: call.id.clone(),
        name: call.name.clone(),
        text: text.into(),
        is_error: true,
        led_nowhere: false,
        reminder: None,
    }
}

/// The lock can be held for a moment by nobody who writes: a child of ours between `fork` and `exec` has the open file
/// too, and `cob session list` tries the lock. So a locked file is tried again before it is refused.
fn lock(file: &File, path: &Path) -> Result<(), SessionError> {
    lock_within(file, path, Duration::from_millis(300))
}

fn lock_within(file: &File, path: &Path, patience: Duration) -> Result<(), SessionError> {
    let begin = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if begin.elapsed() >= patience => {
                return Err(SessionError::Locked(path.to_owned()));
            }
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(10)),
            Err(TryLockError::Error(error)) => return Err(io_error(path, "lock")(error)),
        }
    }
}

fn create_private_dir(dir: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(dir)
}

fn owner_only(options: &mut OpenOptions) {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(options, 0o600);
    #[cfg(not(unix))]
    let _ = options;
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// One session as `cob session list` shows it.
#[derive(Debug, serde::Serialize)]
pub struct Summary {
    pub id: String,
    pub bytes: u64,
    /// Another process has it open now.
    pub live: bool,
    pub started_ms: Option<u64>,
    pub model: Option<String>,
    /// The text of the first task.
    pub task: Option<String>,
    /// Steps of the model.
    pub turns: usize,
    pub calls: usize,
    /// Why the last task ended; `None` where it has not.
    pub stop_reason: Option<StopReason>,
    /// Why the file cannot be read.
    pub problem: Option<String>,
}

/// The sessions of the folder, oldest first. A file that cannot be read is listed with its problem.
pub fn list(dir: &Path) -> Result<Vec<Summary>, SessionError> {
    let mut summaries = Vec::new();
    for id in ids(dir)? {
        summaries.push(summarise(&path(dir, &id)?, &id));
    }
    summaries.sort_by(|a, b| a.id.cmp(&b.id));
    Ok(summaries)
}

/// How long a list waits to tell a session in use from a child between `fork` and `exec`: once for each that is in use.
const LOOK: Duration = Duration::from_millis(50);

fn summarise(path: &Path, id: &str) -> Summary {
    let mut summary = Summary {
        id: id.to_owned(),
        bytes: fs::metadata(path).map_or(0, |meta| meta.len()),
        live: open_file(path, OpenOptions::new().read(true))
            .is_ok_and(|file| matches!(lock_within(&file, path, LOOK), Err(SessionError::Locked(_)))),
        started_ms: None,
        model: None,
        task: None,
        turns: 0,
        calls: 0,
        stop_reason: None,
        problem: None,
    };
    let log = match read(path) {
        Ok(log) => log,
        Err(error) => {
            summary.problem = Some(error.to_string());
            return summary;
        }
    };
    for record in &log.records {
        match &record.event {
            Event::Init { run, .. } => {
                summary.started_ms = Some(record.time_ms);
                summary.model = Some(run.model.id.clone());
            }
            Event::Resumed { run } => summary.model = Some(run.model.id.clone()),
            Event::User { text } => {
                summary.task.get_or_insert_with(|| text.clone());
                summary.stop_reason = None;
            }
            Event::Assistant { message, .. } => {
                summary.turns += 1;
                summary.calls += message.calls.len();
                summary.stop_reason = None;
            }
            Event::Stopped { reason, .. } => summary.stop_reason = Some(*reason),
            _ => {}
        }
    }
    if log.records.is_empty() {
        summary.problem = Some("it holds no complete event".into());
    }
    summary
}

/// Deletes a session that no process has open.
pub fn remove(dir: &Path, id: &str) -> Result<PathBuf, SessionError> {
    let path = path(dir, id)?;
    let file = open_file(&path, OpenOptions::new().read(true))?;
    lock(&file, &path)?;
    fs::remove_file(&path).map_err(io_error(&path, "remove"))?;
    Ok(path)
}
