//! Memory that is refused: the kernel's fault injection fails some of the allocations that happen
//! under the driver's functions (Documentation/fault-injection), while the device is bound and
//! while programs make and use objects.
//!
//! What cannot be had fails, and nothing else: no complaint of the kernel, no object that is left,
//! and with the last refusal everything works again. Only the debug kernel has the means.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{Life, NICS};

const RUN: Duration = Duration::from_secs(120);

/// Shell functions: `refuse PERCENT` from now on, within the module; `grant` all again.
const TOOLS: &str = "
mountpoint -q /sys/kernel/debug || mount -t debugfs debugfs /sys/kernel/debug
refuse() {
  # The shell counts with a sign.
  begin=$(cat /sys/module/virtio_rdma/sections/.text)
  low=${begin#0xffffffff}
  size=$(sed -n 's/^virtio_rdma \\([0-9]*\\) .*/\\1/p' /proc/modules)
  for f in /sys/kernel/debug/failslab /sys/kernel/debug/fail_page_alloc; do
    echo $begin > $f/require-start
    printf '0xffffffff%08x' $((0x$low + size)) > $f/require-end
    echo 32 > $f/stacktrace-depth
    echo N > $f/ignore-gfp-wait
    echo 1 > $f/verbose
    echo 100000 > $f/verbose_ratelimit_burst
    echo -1 > $f/times
    echo $1 > $f/probability
  done
  echo 0 > /sys/kernel/debug/fail_page_alloc/min-order
}
grant() { for f in failslab fail_page_alloc; do echo 0 > /sys/kernel/debug/$f/probability; done; }
";

/// Bound again and again; a device that could not be bound is bound when memory is there.
const BIND: &str = "
driver=/sys/bus/virtio/drivers/virtio_rdma
dev=$(basename $(ls -d $driver/virtio*))
refused=0
for turn in 1 2 3 4 5 6 7 8 9 10 11 12; do
  echo $dev > $driver/unbind || exit 1
  refuse 4
  echo $dev > $driver/bind 2>/dev/null || refused=$((refused+1))
  grant
  [ -e $driver/$dev ] || echo $dev > $driver/bind || exit 1
done
echo $refused
";

/// Programs that make and use objects of every kind; each ends as it likes, but ends.
const USE: &str = "
for turn in 1 2 3 4 5; do
  refuse 2
  timeout 200 /host/products/vrdma-verbs {device} > /tmp/refused 2>&1
  status=$?
  grant
  [ $status -lt 124 ] || { echo vrdma-verbs ended with $status; cat /tmp/refused; exit 1; }
done
dmesg | grep -c 'FAULT_INJECTION: forcing a failure'
";

impl Life {
    pub(super) fn refuse_memory(&mut self) -> Result<()> {
        let bound = self.guest(0)?.must(&format!("{TOOLS}{BIND}"), RUN)?;
        let refused = number(&bound)?;
        self.reattach()?;
        let device = self.devices.options(0);
        let script = format!("{TOOLS}{}", USE.replace("{device}", &device));
        let failures = number(&self.guest(0)?.must(&script, 8 * RUN)?)?;
        eprintln!("    {failures} allocations were refused, {refused} of 12 times the device");
        ensure!(refused > 0, "no probe was ever short of memory");
        ensure!(failures > 50, "only {failures} allocations were refused");
        self.wait_empty(NICS[0], true)
    }
}

fn number(text: &str) -> Result<u32> {
    let last = text.lines().last().unwrap_or_default();
    last.trim().parse().with_context(|| format!("no number at the end of {text:?}"))
}
