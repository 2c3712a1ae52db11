//! The append-only log of a session, and its readers.
//!
//! A session is one file, `ID.jsonl`, one [`Event`] a line:
//! `{"v":1,"seq":4,"time_ms":1764521443123,"type":"tool_started","call_id":"call_0"}`. What the model sees is derived from
//! it (`context::messages`), so that what was run and what was logged cannot differ.
//!
//! * **Durable**: [`Session::sync`] is called before a tool runs and at the end of a task. What was not synced can be lost
//!   in a crash, never half of a line: a torn last line is cut off when the session is opened, and that is said.
//! * **Refused rather than guessed**: a corrupt line before the last, a newer format, an event that is unknown and not
//!   marked `"optional":true`.
//! * **One writer**: the file is locked (advisory) for as long as a [`Session`] lives.
//!
//! Only this room writes the log.

mod event;
mod id;
mod log;

pub use event::{Event, FORMAT, Record, RunInfo};
pub use id::{is_valid as is_valid_id, random_u64, utc};
pub use log::{Log, Session, SessionError, Summary, find, latest, list, path, read, remove, unanswered};

#[cfg(test)]
mod tests;
