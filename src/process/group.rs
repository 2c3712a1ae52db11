//! The process group of one child.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::LINGER_GRACE;

/// The variable in the environment of a child, and of all that it starts, by which those that leave the group are found.
pub(super) const MARK: &str = "COB_CALL";

/// A value of [`MARK`] that no other child has.
pub(super) fn mark() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// The groups that are not finished yet.
static LIVE: Mutex<Live> = Mutex::new(Live { over: false, groups: Vec::new() });

struct Live {
    /// Whatever is still started is killed at once.
    over: bool,
    groups: Vec<(i32, String)>,
}

fn live() -> MutexGuard<'static, Live> {
    LIVE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Kills every child that runs and all that it started, and whatever is started from now on: the process is about to end.
pub fn kill_all() {
    let mut live = live();
    live.over = true;
    live.groups.iter().for_each(|(id, mark)| kill(*id, mark));
}

/// Kills the group when it is dropped unfinished.
///
/// The number stays taken as long as any process is in the group, so a signal reaches ours or no one; only between the
/// last member's end and the signal could it be given to another group, a window of microseconds in a cycle of
/// thousands of numbers.
pub(super) struct Group {
    id: Option<i32>,
    mark: String,
    /// Something was found alive after the child's own end.
    pub(super) left_behind: bool,
}

impl Group {
    pub(super) fn new(leader: Option<u32>, mark: String) -> Self {
        let id = leader.and_then(|id| i32::try_from(id).ok()).filter(|&id| id > 1);
        if let Some(id) = id {
            let mut live = live();
            live.groups.push((id, mark.clone()));
            if live.over {
                kill(id, &mark);
            }
        }
        Group { id, mark, left_behind: false }
    }

    /// Asks the group to end.
    pub(super) fn terminate(&self) {
        if let Some(id) = self.id {
            // SAFETY: kill touches no memory of ours; `id` > 1, so it means one group, not all processes.
            unsafe { libc::kill(-id, libc::SIGTERM) };
        }
    }

    /// Kills the group and what left it.
    pub(super) fn kill(&self) {
        if let Some(id) = self.id {
            kill(id, &self.mark);
        }
    }

    /// Kills what is left; whether the child, having ended by `itself`, left something behind.
    pub(super) async fn finish(mut self, itself: bool) -> bool {
        let started = Instant::now();
        while itself && !self.left_behind && self.alive() {
            if started.elapsed() >= LINGER_GRACE {
                self.left_behind = true;
            } else {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        self.left_behind && itself
    }

    fn alive(&self) -> bool {
        let Some(id) = self.id else { return false };
        // SAFETY: as above; signal 0 only asks.
        let exists = unsafe { libc::kill(-id, 0) } == 0;
        (exists && has_running_member(id)) || !strays(&self.mark).is_empty()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill();
        live().groups.retain(|(_, mark)| *mark != self.mark);
    }
}

fn kill(id: i32, mark: &str) {
    /// A process may start another between being found and being killed.
    const ROUNDS: usize = 10;
    // SAFETY: as above.
    unsafe { libc::kill(-id, libc::SIGKILL) };
    for _ in 0..ROUNDS {
        let strays = strays(mark);
        if strays.is_empty() {
            break;
        }
        for stray in strays {
            // SAFETY: as above; `stray` > 1 was found a moment ago with a mark that only ours bear.
            unsafe { libc::kill(stray, libc::SIGKILL) };
        }
    }
}

/// The processes that bear the mark, in the group or not. Those that have ended have no environment.
#[cfg(target_os = "linux")]
fn strays(mark: &str) -> Vec<i32> {
    let marked = format!("{MARK}={mark}");
    let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
    let numbers = processes.flatten().filter_map(|process| process.file_name().to_str()?.parse().ok());
    let bears_mark = |id: &i32| {
        let environment = std::fs::read(format!("/proc/{id}/environ")).unwrap_or_default();
        environment.split(|&byte| byte == 0).any(|variable| variable == marked.as_bytes())
    };
    numbers.filter(|&id| id > 1).filter(bears_mark).collect()
}

#[cfg(not(target_os = "linux"))]
fn strays(_: &str) -> Vec<i32> {
    Vec::new()
}

/// Dead processes that nobody has collected still count as members, for ever under an init that does not collect.
#[cfg(target_os = "linux")]
fn has_running_member(group: i32) -> bool {
    let Ok(processes) = std::fs::read_dir("/proc") else { return true };
    processes.flatten().any(|process| {
        let Ok(stat) = std::fs::read(process.path().join("stat")) else { return false };
        // "pid (name) state parent group …"; the name may hold anything, parentheses too.
        let Some(end) = stat.iter().rposition(|&byte| byte == b')') else { return false };
        let fields = String::from_utf8_lossy(&stat[end + 1..]);
        let mut fields = fields.split_whitespace();
        let state = fields.next().unwrap_or("Z");
        let of_group = fields.nth(1).and_then(|field| field.parse().ok()) == Some(group);
        of_group && !matches!(state, "Z" | "X")
    })
}

#[cfg(not(target_os = "linux"))]
fn has_running_member(_: i32) -> bool {
    true
}
