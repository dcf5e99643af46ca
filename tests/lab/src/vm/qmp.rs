//! QEMU's machine protocol (docs/interop/qmp-spec.rst of QEMU): one JSON object per line, answers
//! and events on one stream.
//!
//! Each command is awaited; what arrives meanwhile without being its answer is an event and is kept
//! until somebody asks for it.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::exec;

/// A removal of a device waits for the guest.
const EVENT_WAIT: Duration = Duration::from_secs(60);
const ANSWER_WAIT: Duration = Duration::from_secs(30);
const SLICE: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(crate) struct Qmp {
    stream: BufReader<UnixStream>,
    line: Vec<u8>,
    events: Vec<Value>,
}

impl Qmp {
    pub(crate) fn connect(path: &Path) -> Result<Self> {
        let stream = UnixStream::connect(path)
            .with_context(|| format!("QEMU's monitor {} cannot be reached", path.display()))?;
        stream.set_read_timeout(Some(SLICE))?;
        let mut qmp = Self { stream: BufReader::new(stream), line: Vec::new(), events: Vec::new() };
        qmp.read("QEMU's greeting", ANSWER_WAIT, |v| v.get("QMP").cloned())?;
        qmp.execute("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    /// One command; its `return`.
    pub(crate) fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        let text = json!({ "execute": command, "arguments": arguments }).to_string() + "\n";
        self.stream
            .get_mut()
            .write_all(text.as_bytes())
            .with_context(|| format!("QEMU does not take `{command}`"))?;
        let answer = self.read(&format!("the answer to `{command}`"), ANSWER_WAIT, |v| {
            (v.get("return").is_some() || v.get("error").is_some()).then(|| v.clone())
        })?;
        if let Some(error) = answer.get("error") {
            bail!("QEMU refuses {}: {error}", text.trim_end());
        }
        Ok(answer.get("return").cloned().unwrap_or_default())
    }

    /// Unplugs a device and waits until the guest has let it go.
    pub(crate) fn unplug(&mut self, id: &str) -> Result<()> {
        self.execute("device_del", &json!({ "id": id }))?;
        let gone = |v: &Value| {
            let of = v.pointer("/data/device").and_then(Value::as_str) == Some(id);
            match v.get("event").and_then(Value::as_str) {
                Some("DEVICE_DELETED") if of => Some(true),
                Some("DEVICE_UNPLUG_GUEST_ERROR" | "MEM_UNPLUG_ERROR") if of => Some(false),
                _ => None,
            }
        };
        let kept = self.events.iter().position(|v| gone(v).is_some());
        let gone = match kept {
            Some(n) => gone(&self.events.remove(n)),
            None => Some(self.read(&format!("{id} to be unplugged"), EVENT_WAIT, gone)?),
        };
        if gone != Some(true) {
            bail!("the guest refuses to let {id} go");
        }
        Ok(())
    }

    /// The first message that `pick` takes; events that it does not take are kept.
    fn read<T>(
        &mut self,
        what: &str,
        timeout: Duration,
        pick: impl Fn(&Value) -> Option<T>,
    ) -> Result<T> {
        let deadline = Instant::now() + timeout;
        loop {
            exec::check_interrupt()?;
            match self.stream.read_until(b'\n', &mut self.line) {
                Ok(0) => bail!("QEMU closed its monitor; waited for {what}"),
                Ok(_) => {
                    let value: Value = serde_json::from_slice(&self.line)
                        .context("QEMU's monitor does not speak JSON")?;
                    self.line.clear();
                    if let Some(picked) = pick(&value) {
                        return Ok(picked);
                    }
                    if value.get("event").is_some() {
                        self.events.push(value);
                    }
                }
                // What was read of a line so far stays in the buffer.
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(e) => return Err(e).context("QEMU's monitor"),
            }
            if Instant::now() >= deadline {
                bail!("waited {} s in vain for {what}", timeout.as_secs());
            }
        }
    }
}
