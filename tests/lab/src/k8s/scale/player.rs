//! The program that plays the agents: a line in, a line of JSON out.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::exec::{check_interrupt, end_group};
use crate::k8s::node::Node;

/// The program.
pub(super) const PLAYER: &str = "played-agents";
/// The longest that one thing may take: to make five thousand nodes.
const WAIT: Duration = Duration::from_secs(1800);

#[derive(Debug)]
pub(super) struct Player {
    child: Child,
    input: ChildStdin,
    answers: Receiver<String>,
}

impl Player {
    pub(super) fn start(node: &Node, options: &[&str]) -> Result<Self> {
        let mut command = node.command("/usr/bin/played-agents");
        command.args(options).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("cannot start the played agents")?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (input, output) = (input.context("no input")?, output.context("no output")?);
        let (send, answers) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { child, input, answers })
    }

    /// Asks for something, whose answer comes later.
    pub(super) fn say(&mut self, line: &str) -> Result<()> {
        writeln!(self.input, "{line}").context("the played agents are gone")
    }

    /// The answer.
    pub(super) fn hear(&mut self) -> Result<Value> {
        let begun = Instant::now();
        while begun.elapsed() < WAIT {
            check_interrupt()?;
            match self.answers.recv_timeout(Duration::from_millis(200)) {
                Ok(line) => {
                    let answer: Value = serde_json::from_str(&line)
                        .with_context(|| format!("the played agents say {line:?}"))?;
                    if let Some(error) = answer.get("error").and_then(Value::as_str) {
                        bail!("the played agents: {error}");
                    }
                    return Ok(answer);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => bail!("the played agents ended"),
            }
        }
        bail!("no answer of the played agents within {} s", WAIT.as_secs())
    }

    pub(super) fn ask(&mut self, line: &str) -> Result<Value> {
        self.say(line)?;
        self.hear().with_context(|| format!("{line:?}"))
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        end_group(&mut self.child, Duration::from_secs(1));
    }
}

/// A number of an answer.
pub(super) fn number(answer: &Value, key: &str) -> Result<f64> {
    let found = answer.get(key).and_then(Value::as_f64);
    found.with_context(|| format!("no {key:?} in {answer}"))
}
