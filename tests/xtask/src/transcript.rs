//! What is printed while something runs, shown as ever and kept beside that.
//!
//! Whoever reads the end of a log of an hour wants to know there why a step failed, and a step
//! prints that in its midst: a row's reason before the next row, a table of another program. So
//! both outputs of this process, and of all programs that it starts, go through pipes on their way,
//! and the lines that tell of a failure are found again. In a terminal nothing is in between: a
//! person scrolls, and progress is shown there by rewriting a line.
//!
//! A zero byte asks a pipe's reader whether it has seen all that came before: what programs print
//! has none.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IsTerminal, PipeReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Result;
use rustix::stdio::{dup2_stderr, dup2_stdout};

/// Lines that are kept, and bytes of each.
const LINES: usize = 20_000;
const LINE_BYTES: usize = 400;
/// Lines that are told of a failure, at the most.
const TOLD: usize = 40;
/// For how long a reader may take to have seen all.
const CAUGHT_UP: Duration = Duration::from_secs(10);

/// From its start on, everything that is printed is kept.
#[derive(Debug)]
pub(crate) struct Transcript {
    lines: Arc<Mutex<VecDeque<String>>>,
    /// Output and errors as they were; `None` in a terminal.
    before: Option<[OwnedFd; 2]>,
    caught_up: Receiver<()>,
}

impl Transcript {
    /// Nothing is in between if standard error is a terminal.
    pub(crate) fn start() -> Result<Self> {
        let (said, caught_up) = channel();
        let mut it = Self { lines: Arc::default(), before: None, caught_up };
        if !io::stderr().is_terminal() {
            let before = [
                io::stdout().as_fd().try_clone_to_owned()?,
                io::stderr().as_fd().try_clone_to_owned()?,
            ];
            let (out, err) = (it.reader(&before[0], &said)?, it.reader(&before[1], &said)?);
            dup2_stdout(out)?;
            dup2_stderr(err)?;
            it.before = Some(before);
        }
        Ok(it)
    }

    /// The end of a pipe whose reader shows and keeps what comes.
    fn reader(&self, to: &OwnedFd, caught_up: &Sender<()>) -> io::Result<io::PipeWriter> {
        let (from, end) = io::pipe()?;
        let (to, lines) = (File::from(to.try_clone()?), Arc::clone(&self.lines));
        let caught_up = caught_up.clone();
        std::thread::spawn(move || pass_on(from, to, &lines, &caught_up));
        Ok(end)
    }

    /// What was printed since this was asked last.
    pub(crate) fn take(&self) -> Vec<String> {
        if self.before.is_some() {
            // Only these two writes are ours; a reader that is gone says nothing, and is not
            // waited for without a limit.
            let asked = [io::stdout().write_all(&[0]), io::stdout().flush()];
            let asked = asked.into_iter().chain([io::stderr().write_all(&[0])]);
            if asked.into_iter().all(|wrote| wrote.is_ok()) {
                for _ in 0..2 {
                    let _ = self.caught_up.recv_timeout(CAUGHT_UP);
                }
            }
        }
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).drain(..).collect()
    }
}

impl Drop for Transcript {
    fn drop(&mut self) {
        self.take();
        if let Some([out, err]) = &self.before {
            let _ = (dup2_stdout(out), dup2_stderr(err));
        }
    }
}

fn pass_on(
    mut from: PipeReader,
    mut to: File,
    lines: &Mutex<VecDeque<String>>,
    caught_up: &Sender<()>,
) {
    let (mut room, mut line) = ([0; 16_384], Vec::new());
    loop {
        let bytes = match from.read(&mut room) {
            Ok(0) | Err(_) => return,
            Ok(count) => room.get(..count).unwrap_or_default(),
        };
        for part in bytes.split_inclusive(|byte| *byte == 0) {
            let shown = part.strip_suffix(&[0]).unwrap_or(part);
            // What cannot be shown can still be kept.
            let _ = to.write_all(shown);
            for &byte in shown {
                if byte == b'\n' {
                    keep(lines, &line);
                    line.clear();
                } else if line.len() < LINE_BYTES {
                    line.push(byte);
                }
            }
            if shown.len() < part.len() {
                let _ = caught_up.send(());
            }
        }
    }
}

fn keep(lines: &Mutex<VecDeque<String>>, line: &[u8]) {
    let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
    lines.push_back(String::from_utf8_lossy(line).into_owned());
    if lines.len() > LINES {
        lines.pop_front();
    }
}

/// The lines that tell of failures, each with one before and some after it; the last lines, if
/// none does.
pub(crate) fn reasons(lines: &[String]) -> Vec<&str> {
    const BEFORE: usize = 1;
    const AFTER: usize = 4;
    let mut wanted = vec![false; lines.len()];
    for (at, _) in lines.iter().enumerate().filter(|(_, line)| tells(line)) {
        let end = (at + AFTER + 1).min(lines.len());
        wanted[at.saturating_sub(BEFORE)..end].fill(true);
    }
    let mut found: Vec<&str> = Vec::new();
    for (line, _) in lines.iter().zip(&wanted).filter(|(_, wanted)| **wanted) {
        found.push(line);
    }
    if found.is_empty() {
        found.extend(lines.iter().rev().take(TOLD / 2).rev().map(String::as_str));
    }
    // The first failure is often the cause, and the last lines are often the verdict.
    if found.len() > TOLD {
        let cut = found.len() - TOLD;
        found.splice(TOLD / 2..TOLD / 2 + cut, ["[…]"]);
    }
    found
}

fn tells(line: &str) -> bool {
    let line = line.to_ascii_lowercase();
    let words = ["fail", "error:", "panicked", "timed out", "killed by"];
    let none = [" 0 fail", "none failed"];
    words.iter().any(|word| line.contains(word)) && !none.iter().any(|word| line.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(Into::into).collect()
    }

    #[test]
    fn what_failed_is_found_with_its_reason() {
        let quiet = "row: ok\n".repeat(30);
        let text = format!("{quiet}row x: exit status: 1\nfail words: line 7\nwhy\n{quiet}");
        let printed = lines(&text);
        let told = reasons(&printed);
        assert!(told.contains(&"row x: exit status: 1"), "{told:?}");
        assert!(told.contains(&"why") && told.len() < 10, "{told:?}");
    }

    #[test]
    fn a_summary_of_no_failure_is_no_reason() {
        let printed = lines("it goes\n12 passed, 0 failed\nthe end");
        assert_eq!(reasons(&printed), ["it goes", "12 passed, 0 failed", "the end"]);
        assert!(tells("2 passed, 10 failed") && !tells("12 passed, 0 failed"));
    }

    #[test]
    fn of_many_the_first_and_the_last_are_told() {
        let printed: Vec<String> = (0..500).map(|n| format!("{n} FAILED")).collect();
        let told = reasons(&printed);
        assert_eq!((told.len(), told[0], told[TOLD]), (TOLD + 1, "0 FAILED", "499 FAILED"));
    }

    #[test]
    fn what_goes_through_is_shown_and_kept() {
        let (from, mut end) = io::pipe().unwrap();
        let (mut seen, to) = io::pipe().unwrap();
        let (said, caught_up) = channel();
        let kept = Mutex::default();
        std::thread::scope(|scope| {
            let to = File::from(OwnedFd::from(to));
            scope.spawn(|| pass_on(from, to, &kept, &said));
            end.write_all(b"one\ntw").unwrap();
            end.write_all(b"o\n\0").unwrap();
            caught_up.recv_timeout(CAUGHT_UP).unwrap();
            assert_eq!(*kept.lock().unwrap(), ["one", "two"]);
            drop(end);
        });
        let mut shown = String::new();
        seen.read_to_string(&mut shown).unwrap();
        assert_eq!(shown, "one\ntwo\n");
    }
}
