//! A server on 127.0.0.1 that speaks the hub's protocol, and misbehaves when asked to.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// One request as it came.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    pub path: String,
    pub range: Option<String>,
    pub authorization: Option<String>,
}

/// A file that the server offers.
#[derive(Clone)]
pub struct Served {
    pub name: String,
    pub bytes: Vec<u8>,
    /// The LFS oid; without one the file is a plain git file with this etag.
    pub oid: Option<String>,
    pub etag: String,
    /// Announced instead of the true size.
    pub announced: Option<u64>,
}

/// What one answer to a GET of bytes does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Act {
    Serve,
    /// Closes the connection after this many bytes of the body.
    Cut(usize),
    /// Sends nothing more after this many bytes, and holds the connection.
    Stall(usize),
    /// Sends the whole file although a rest was asked for.
    IgnoreRange,
    Status(u16),
}

#[derive(Default)]
pub struct State {
    pub files: Vec<Served>,
    pub requests: Vec<Request>,
    /// Of bodies, as handed to the socket.
    pub bytes_served: usize,
    /// Of the next GETs of bytes; then [`Act::Serve`].
    pub acts: VecDeque<Act>,
    /// The token that is wanted.
    pub token: Option<String>,
    /// Accepts and never answers.
    pub silent: bool,
    /// Between two pieces of a body.
    pub pause: Duration,
}

pub struct FakeHub {
    pub state: Arc<Mutex<State>>,
    /// The hub.
    pub addr: SocketAddr,
}

pub const REPOSITORY: &str = "org/model";
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

impl FakeHub {
    pub fn start(files: Vec<Served>) -> FakeHub {
        let state = Arc::new(Mutex::new(State { files, ..State::default() }));
        // The bytes of LFS files come from another place than the hub's answers, as with the real one.
        let cdn = listen(state.clone(), None);
        let addr = listen(state.clone(), Some(cdn));
        FakeHub { state, addr }
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.addr)
    }

    pub fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap());
    }

    pub fn requests(&self, method: &str) -> Vec<Request> {
        self.state.lock().unwrap().requests.iter().filter(|r| r.method == method).cloned().collect()
    }

    /// GETs that reached the bytes.
    pub fn gets(&self) -> Vec<Request> {
        self.requests("GET").into_iter().filter(|r| !r.path.contains("/resolve/")).collect()
    }

    pub fn bytes_served(&self) -> usize {
        self.state.lock().unwrap().bytes_served
    }
}

fn listen(state: Arc<Mutex<State>>, cdn: Option<SocketAddr>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let state = state.clone();
            std::thread::spawn(move || {
                let _ = answer(stream, &state, cdn);
            });
        }
    });
    addr
}

/// One request a connection.
fn answer(mut stream: TcpStream, state: &Mutex<State>, cdn: Option<SocketAddr>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut words = line.split_whitespace().map(String::from);
    let (Some(method), Some(path)) = (words.next(), words.next()) else { return Ok(()) };
    let mut request = Request { method, path, range: None, authorization: None };
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 || line.trim().is_empty() {
            break;
        }
        let (key, value) = line.split_once(':').unwrap_or_default();
        match key.to_lowercase().as_str() {
            "range" => request.range = Some(value.trim().to_string()),
            "authorization" => request.authorization = Some(value.trim().to_string()),
            _ => {}
        }
    }
    let (file, token, silent) = {
        let mut state = state.lock().unwrap();
        state.requests.push(request.clone());
        let name = request.path.rsplit('/').next().unwrap_or_default();
        (state.files.iter().find(|f| f.name == name).cloned(), state.token.clone(), state.silent)
    };
    if silent {
        std::thread::sleep(Duration::from_secs(60));
        return Ok(());
    }
    let plain = |stream: &mut TcpStream, status: u16, headers: &str| {
        write!(stream, "HTTP/1.1 {status} X\r\nConnection: close\r\n{headers}Content-Length: 0\r\n\r\n")
    };
    let on_hub = request.path.starts_with(&format!("/{REPOSITORY}/resolve/"));
    let moved = request.path.starts_with("/moved/");
    if cdn.is_some() && !on_hub && !moved {
        return plain(&mut stream, 404, "");
    }
    if on_hub && token.is_some_and(|t| request.authorization != Some(format!("Bearer {t}"))) {
        return plain(&mut stream, 401, "");
    }
    let Some(file) = file else { return plain(&mut stream, 404, &format!("X-Repo-Commit: {COMMIT}\r\n")) };
    let size = file.announced.unwrap_or(file.bytes.len() as u64);
    match (cdn, &file.oid) {
        (Some(cdn), Some(oid)) => {
            let headers = format!(
                "X-Repo-Commit: {COMMIT}\r\nX-Linked-Etag: \"{oid}\"\r\nX-Linked-Size: {size}\r\nETag: \"other\"\r\n\
                 Location: http://{cdn}/bytes/{}\r\n",
                file.name
            );
            plain(&mut stream, 302, &headers)
        }
        (Some(_), None) if on_hub => {
            let headers = format!("X-Repo-Commit: {COMMIT}\r\nLocation: /moved/{}\r\n", file.name);
            plain(&mut stream, 307, &headers)
        }
        _ if request.method == "HEAD" => write!(
            stream,
            "HTTP/1.1 200 X\r\nConnection: close\r\nETag: W/\"{}\"\r\nContent-Length: {size}\r\n\r\n",
            file.etag
        ),
        _ => body(stream, &request, &file, state),
    }
}

fn body(mut stream: TcpStream, request: &Request, file: &Served, state: &Mutex<State>) -> std::io::Result<()> {
    let (act, pause) = {
        let mut state = state.lock().unwrap();
        (state.acts.pop_front().unwrap_or(Act::Serve), state.pause)
    };
    let total = file.bytes.len();
    let asked = request.range.as_ref().map(|r| r.trim_start_matches("bytes=").trim_end_matches('-').parse().unwrap());
    let start: usize = if act == Act::IgnoreRange { 0 } else { asked.unwrap_or(0) };
    if let Act::Status(status) = act {
        return write!(stream, "HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: 0\r\n\r\n");
    }
    if start >= total {
        return write!(stream, "HTTP/1.1 416 X\r\nConnection: close\r\nContent-Length: 0\r\n\r\n");
    }
    let length = total - start;
    if start > 0 {
        write!(stream, "HTTP/1.1 206 X\r\nContent-Range: bytes {start}-{}/{total}\r\n", total - 1)?;
    } else {
        write!(stream, "HTTP/1.1 200 X\r\n")?;
    }
    write!(stream, "Connection: close\r\nContent-Length: {length}\r\n\r\n")?;
    let end = match act {
        Act::Cut(n) | Act::Stall(n) => start + n.min(length),
        _ => total,
    };
    for piece in file.bytes[start..end].chunks(4096) {
        stream.write_all(piece)?;
        state.lock().unwrap().bytes_served += piece.len();
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
    }
    stream.flush()?;
    if let Act::Stall(_) = act {
        std::thread::sleep(Duration::from_secs(60));
    }
    Ok(())
}
