//! What a long piece of work shows while it goes on.

use std::io::Write;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::hub::{HubEvent, human_bytes};

/// Shows [`HubEvent`]s on standard error: a bar on a terminal, else a line for every tenth and at most one a second.
pub struct Progress<'a> {
    err: &'a mut dyn Write,
    terminal: bool,
    bar: Option<ProgressBar>,
    what: String,
    tenth: u64,
    said: Instant,
}

impl<'a> Progress<'a> {
    /// `terminal` tells whether standard error is one and a bar is wanted; `err` gets everything else.
    pub fn new(err: &'a mut dyn Write, terminal: bool) -> Progress<'a> {
        Progress { err, terminal, bar: None, what: String::new(), tenth: 0, said: Instant::now() }
    }

    pub fn event(&mut self, event: HubEvent) {
        match event {
            HubEvent::Note(text) => self.line(&text),
            HubEvent::Progress { what, bytes_done, bytes_total } if self.terminal => {
                if self.what != what {
                    self.finish();
                    self.what = what.to_string();
                }
                let bar = self.bar.get_or_insert_with(|| new_bar(what));
                if bar.length() != bytes_total {
                    match bytes_total {
                        Some(total) => bar.set_length(total),
                        None => bar.unset_length(),
                    }
                }
                bar.set_position(bytes_done);
            }
            HubEvent::Progress { what, bytes_done, bytes_total } => self.plain(what, bytes_done, bytes_total),
        }
    }

    /// Takes the bar away; the next event may begin another one.
    pub fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        self.what.clear();
    }

    fn line(&mut self, text: &str) {
        let err = &mut self.err;
        // That standard error is gone is no reason to stop.
        match &self.bar {
            Some(bar) => bar.suspend(|| drop(writeln!(err, "cob: {text}"))),
            None => drop(writeln!(err, "cob: {text}")),
        }
    }

    fn plain(&mut self, what: &str, bytes_done: u64, bytes_total: Option<u64>) {
        let Some(total) = bytes_total.filter(|total| *total > 0) else { return };
        let tenth = (u128::from(bytes_done) * 10 / u128::from(total)) as u64;
        if self.what != what {
            self.what = what.to_string();
            self.tenth = tenth;
            self.said = Instant::now();
            return;
        }
        if tenth > self.tenth && self.said.elapsed() >= Duration::from_secs(1) {
            self.tenth = tenth;
            self.said = Instant::now();
            self.line(&format!("{what}: {} % of {}", tenth * 10, human_bytes(total)));
        }
    }
}

impl Drop for Progress<'_> {
    fn drop(&mut self) {
        self.finish();
    }
}

fn new_bar(what: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    let template = "{msg} [{bar:24}] {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message(what.to_string());
    bar
}
