//! The threads of the kernels: one job at a time, its parts taken from a counter.
//!
//! A token runs some two hundred jobs of tens of microseconds, so a thread that waits spins for a short while before it
//! sleeps: long enough to bridge the gap between two jobs, short enough not to starve a shared machine.

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering::*};
use std::sync::{Arc, Condvar, Mutex};

/// How often a waiting thread looks before it sleeps (about 20 µs).
const SPINS: u32 = 4_000;

pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<std::thread::JoinHandle<()>>,
}

type Part<'a> = dyn Fn(usize) + Sync + 'a;

struct Shared {
    /// Odd while a job is open. A worker enters a job only by raising `inside` first and then seeing the same epoch.
    epoch: AtomicU32,
    /// Thin pointer to the fat pointer of the open job.
    job: AtomicPtr<&'static Part<'static>>,
    parts: AtomicUsize,
    next: AtomicUsize,
    /// Workers that are inside the open job.
    inside: AtomicUsize,
    panicked: AtomicBool,
    closed: AtomicBool,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

impl Pool {
    /// `threads` in all, the caller of [`Pool::run`] being one of them. Fails when the system gives no more threads.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            epoch: AtomicU32::new(0),
            job: AtomicPtr::new(std::ptr::null_mut()),
            parts: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            inside: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
        });
        // After an error the pool is dropped, and with it the threads that have started.
        let mut pool = Pool { shared, workers: Vec::new() };
        for i in 1..threads.max(1) {
            let shared = pool.shared.clone();
            let thread = std::thread::Builder::new().name(format!("cob-kernel-{i}"));
            pool.workers.push(thread.spawn(move || shared.work())?);
        }
        Ok(pool)
    }

    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `part(0)`, …, `part(parts - 1)`, each once, on all threads, and returns when all have returned. Panics if
    /// one did. `&mut self`: one job at a time.
    pub fn run(&mut self, parts: usize, part: &(dyn Fn(usize) + Sync)) {
        if parts <= 1 || self.workers.is_empty() {
            (0..parts).for_each(part);
            return;
        }
        let s = &*self.shared;
        // SAFETY: the reference outlives the job: this function returns only after every worker has left it.
        let job: &'static Part<'static> = unsafe { std::mem::transmute::<&Part<'_>, &'static Part<'static>>(part) };
        let mut slot = job;
        s.job.store(&mut slot, Relaxed);
        s.parts.store(parts, Relaxed);
        s.next.store(0, Relaxed);
        s.epoch.fetch_add(1, SeqCst); // odd: open
        if s.sleepers.load(SeqCst) > 0 {
            drop(s.lock.lock().unwrap());
            s.wake.notify_all();
        }
        let own = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| s.take_parts(job, parts)));
        s.epoch.fetch_add(1, SeqCst); // even: closed to those who have not entered
        let mut spins = 0u32;
        while s.inside.load(SeqCst) > 0 {
            spins += 1;
            if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        if let Err(panic) = own {
            std::panic::resume_unwind(panic);
        }
        assert!(!s.panicked.swap(false, SeqCst), "a kernel thread panicked");
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.closed.store(true, SeqCst);
        drop(self.shared.lock.lock());
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn take_parts(&self, job: &Part, parts: usize) {
        loop {
            let i = self.next.fetch_add(1, Relaxed);
            if i >= parts {
                return;
            }
            job(i);
        }
    }

    fn work(&self) {
        let mut done = 0;
        while let Some(epoch) = self.wait_for_job(done) {
            self.inside.fetch_add(1, SeqCst);
            if self.epoch.load(SeqCst) == epoch {
                // SAFETY: the job is open and `inside` keeps it alive until we leave.
                let (job, parts) = unsafe { (*self.job.load(Relaxed), self.parts.load(Relaxed)) };
                let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.take_parts(job, parts)));
                if result.is_err() {
                    self.panicked.store(true, SeqCst);
                }
            }
            self.inside.fetch_sub(1, SeqCst);
            done = epoch;
        }
    }

    /// The epoch of an open job other than `done`; `None` when the pool closes.
    fn wait_for_job(&self, done: u32) -> Option<u32> {
        let open = || {
            let epoch = self.epoch.load(SeqCst);
            (epoch % 2 == 1 && epoch != done).then_some(epoch)
        };
        for _ in 0..SPINS {
            if let Some(epoch) = open() {
                return Some(epoch);
            }
            std::hint::spin_loop();
        }
        let mut guard = self.lock.lock().unwrap();
        self.sleepers.fetch_add(1, SeqCst);
        let found = loop {
            if self.closed.load(SeqCst) {
                break None;
            }
            if let Some(epoch) = open() {
                break Some(epoch);
            }
            guard = self.wake.wait(guard).unwrap();
        };
        self.sleepers.fetch_sub(1, SeqCst);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_runs_once() {
        for threads in [1, 2, 3, 5] {
            let mut pool = Pool::new(threads).unwrap();
            for parts in (0..40).chain([1000]) {
                let counts: Vec<AtomicUsize> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
                pool.run(parts, &|i| {
                    counts[i].fetch_add(1, SeqCst);
                });
                assert!(counts.iter().all(|c| c.load(SeqCst) == 1), "{threads} threads, {parts} parts");
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives() {
        let mut pool = Pool::new(2).unwrap();
        for bad in 0..8 {
            let run = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                pool.run(8, &|i| assert!(i != bad, "part {i}"));
            }));
            assert!(run.is_err());
        }
        let sum = AtomicUsize::new(0);
        pool.run(10, &|i| {
            sum.fetch_add(i, SeqCst);
        });
        assert_eq!(sum.load(SeqCst), 45);
    }
}
