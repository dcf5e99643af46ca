//! rdma-core's own Python suite, as a release ships it, with one NIC.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::container::Container;
use super::release::Release;
use crate::exec::workspace;
use crate::rows::Row;
use crate::verdicts::{Found, RUNNER, drift, parse, read_pins};

const WAIT: Duration = Duration::from_secs(900);
/// dh_compress leaves some of the tests gzipped, and a gzipped module cannot be imported.
///
/// The suite asks `rdma` which interface a device belongs to, and connects by that interface's
/// address (`get_net_name()` and `get_ip_mac_address()` of tests/base.py). `rdma` asks the kernel,
/// which knows no device of a process's. So the container gets an interface with the NIC's own MAC
/// and IP addresses, and `rdma` says that they belong together. No RDMA goes by the interface.
const SCRIPT: &str = r#"mkdir /tmp/pyverbs
cp -r /usr/share/doc/rdma-core/tests /tmp/pyverbs/
gunzip -f /tmp/pyverbs/tests/*.gz
set -- $VHOST_RDMA_ADDRESSES
guid=$(ibv_devinfo -d vhost_rdma0 | sed -n 's/^[[:space:]]*node_guid:[[:space:]]*//p')
# The GUID is the MAC address with ff:fe in its middle and a bit turned over (EUI-64).
mac=$(echo "$guid" | tr -d : | sed -E 's/^(..)(..)(..)fffe(..)(..)(..)$/\1 \2:\3:\4:\5:\6/')
mac=$(printf '%02x:%s' $((0x${mac%% *} ^ 2)) "${mac#* }")
ip link add nic0 address "$mac" type veth peer name nic0-peer
ip address add "$1/32" dev nic0
ip link set nic0 up
mkdir /run/bin
cat > /run/bin/rdma <<'END'
#!/bin/sh
[ "$*" = "link show -j" ] || exit 1
echo '[{"ifname":"vhost_rdma0","port":1,"netdev":"nic0"}]'
END
chmod +x /run/bin/rdma
PATH=/run/bin:$PATH exec python3 /host/pyverbs-run.py --dir /tmp/pyverbs --dev vhost_rdma0 \
  --results /host/pyverbs.jsonl --only "$ONLY""#;

fn pins(release: Release) -> PathBuf {
    workspace().join(format!("tests/guest-programs/pyverbs-skips-process-{}.txt", release.name()))
}

/// Its row, if any test matches, and whether all is well.
pub(super) fn run(container: &Container, only: Option<&str>) -> Result<(Option<Row>, bool)> {
    let Some(least) = container.release.least() else { return Ok((None, true)) };
    let share = container.share();
    let results = share.join("pyverbs.jsonl");
    fs::write(share.join("pyverbs-run.py"), RUNNER)?;
    let _old = fs::remove_file(&results);
    let begin = Instant::now();
    let script = format!("ONLY='{}'\n{SCRIPT}", only.unwrap_or_default());
    let text = container.run(1, &script, WAIT).context("the suite's runner")?;
    let verdicts = parse(&results)?;
    if verdicts.is_empty() {
        return Ok((None, true));
    }
    print!("{text}");
    let file = pins(container.release);
    let drift = drift(&verdicts, &read_pins(&file)?, only.is_none());
    let name = format!("{}: rdma-core's Python suite", container.release.name());
    let found = Found { of: &name, verdicts: &verdicts, drift: &drift };
    let held = found.sum_up(only.is_none().then_some(least), &file);
    Ok((Some(Row::timed(name, held, begin.elapsed().as_secs_f64())), held))
}
