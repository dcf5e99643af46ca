//! Functions that are made as new when they come back. A directory stands for sysfs and a thread
//! for the kernel: it takes the function from its driver and gives it to it again, which takes away
//! the netdev, wherever it is, and makes another. With a real kernel: `cargo xtask vm cni-rdma`.

// clippy.toml allows these in tests, but does not see that helpers of an integration test are tests
// too.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod lab;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use lab::{FakeAgent, Lab, Pod, vf};
use rdma_netlink::Netns;
use rdma_netlink::link::{Links, NewAddress, Veth};
use serde_json::{Value, json};
use vhost_rdma_agent_api::{Nic, Personality};

const PCI: &str = "0000:3b:00.2";

/// One function with a driver.
struct Kernel {
    sysfs: PathBuf,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    /// The driver takes it when it is asked to.
    takes: AtomicBool,
    /// How often it was taken from its driver, and how often given to it.
    unbound: AtomicU32,
    probed: AtomicU32,
}

impl Kernel {
    /// Its netdev is `vf0` on the host.
    fn start(lab: &Lab) -> Self {
        let sysfs = lab.sysfs();
        for dir in ["bus/pci/drivers/vfdrv", "class/net/vf0", "class/net/eth7"] {
            fs::create_dir_all(sysfs.join(dir)).unwrap();
        }
        fs::create_dir_all(device(&sysfs)).unwrap();
        fs::create_dir_all(device(&sysfs).join("physfn")).unwrap();
        for file in ["bus/pci/drivers_probe", "bus/pci/drivers/vfdrv/unbind"] {
            fs::write(sysfs.join(file), "").unwrap();
        }
        for name in ["vf0", "eth7"] {
            symlink(device(&sysfs), sysfs.join("class/net").join(name).join("device")).unwrap();
        }
        let shared = Arc::new(Shared { takes: true.into(), ..Shared::default() });
        bind(&sysfs, &lab.host, "vf0");
        let (for_thread, root, host) =
            (Arc::clone(&shared), sysfs.clone(), lab.host.try_clone().unwrap());
        let thread = std::thread::spawn(move || {
            while !for_thread.stop.load(Ordering::Relaxed) {
                serve(&root, &host, &for_thread);
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        Self { sysfs, shared, thread: Some(thread) }
    }

    /// How often it was taken from its driver, and how often given to it.
    fn counts(&self) -> (u32, u32) {
        (self.shared.unbound.load(Ordering::Relaxed), self.shared.probed.load(Ordering::Relaxed))
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().unwrap().join();
    }
}

fn device(sysfs: &Path) -> PathBuf {
    sysfs.join("bus/pci/devices").join(PCI)
}

fn bind(sysfs: &Path, host: &Netns, netdev: &str) {
    symlink(sysfs.join("bus/pci/drivers/vfdrv"), device(sysfs).join("driver")).unwrap();
    let mut links = Links::open_in(host).unwrap();
    links.add_veth(&Veth { name: netdev, peer: "wire", ..Veth::default() }).unwrap();
    let wire = links.by_name("wire").unwrap().index;
    links.set_up(wire, true).unwrap();
}

/// What was written to a file since the last look.
fn told(file: &Path) -> bool {
    let written = fs::read_to_string(file).unwrap() == PCI;
    if written {
        fs::write(file, "").unwrap();
    }
    written
}

fn serve(sysfs: &Path, host: &Netns, shared: &Shared) {
    if told(&sysfs.join("bus/pci/drivers/vfdrv/unbind")) {
        // Its peer takes it along wherever it is.
        let mut links = Links::open_in(host).unwrap();
        let wire = links.by_name("wire").unwrap().index;
        links.delete(wire).unwrap();
        shared.unbound.fetch_add(1, Ordering::Relaxed);
        fs::remove_file(device(sysfs).join("driver")).unwrap();
    }
    if told(&sysfs.join("bus/pci/drivers_probe")) {
        shared.probed.fetch_add(1, Ordering::Relaxed);
        if shared.takes.load(Ordering::Relaxed) && !device(sysfs).join("driver").exists() {
            bind(sysfs, host, "eth7");
        }
    }
}

fn nic() -> Nic {
    let mut nic = vf("vf-0", "net1", "vf0");
    if let Personality::Vf { pci, .. } = &mut nic.personality {
        PCI.clone_into(pci);
    }
    nic
}

fn config(lab: &Lab) -> Value {
    let mut config = lab.config("1.0.0");
    config["ipam"] = json!({"type": "ipam"});
    config
}

/// How the host had it: all that must be the same, whichever netdev it is.
fn prepared(lab: &Lab) -> String {
    let mut host = Links::open_in(&lab.host).unwrap();
    let index = host.by_name("vf0").unwrap().index;
    host.set_address(index, &"02:aa:00:00:00:01".parse().unwrap()).unwrap();
    host.set_mtu(index, 2000).unwrap();
    host.set_alias(index, "port 3").unwrap();
    host.add_altname(index, OsStr::new("enp59s0f0v2")).unwrap();
    host.set_up(index, true).unwrap();
    host.add_address(index, &NewAddress::new("192.168.7.1/24".parse().unwrap())).unwrap();
    settings(lab)
}

fn settings(lab: &Lab) -> String {
    let mut host = Links::open_in(&lab.host).unwrap();
    let link = host.by_name("vf0").unwrap();
    let addresses = host.addresses(Some(link.index)).unwrap();
    let addresses: Vec<_> =
        addresses.iter().filter(|a| !a.link_local).map(|a| a.prefix.to_string()).collect();
    format!(
        "{:?} {} {} {:?} {:?} {addresses:?}",
        link.address, link.mtu, link.up, link.alias, link.altnames
    )
}

fn index(lab: &Lab) -> u32 {
    Links::open_in(&lab.host).unwrap().by_name("vf0").unwrap().index
}

#[test]
fn a_function_comes_back_as_new_with_the_hosts_settings() {
    let (lab, pod) = (Lab::new(), Pod::new());
    lab.ipam();
    let kernel = Kernel::start(&lab);
    let (before, old) = (prepared(&lab), index(&lab));
    let agent = FakeAgent::start(&lab.socket(), vec![nic()]);
    lab.call("ADD", &pod, &config(&lab)).good();
    assert_eq!(kernel.counts(), (0, 0));
    // Out of the reach of everybody but the driver: in a namespace that the pod made.
    let deeper = Netns::create().unwrap();
    let net1 = pod.link("net1").index;
    pod.links().move_to(net1, &deeper, Some("hidden")).unwrap();
    lab.call("DEL", &pod, &config(&lab)).good();
    assert_eq!(kernel.counts(), (1, 1));
    assert_eq!(settings(&lab), before);
    assert_ne!(index(&lab), old, "it is another");
    assert_eq!(lab::names(&deeper, &["lo"]), Vec::<String>::new());
    assert!(pod.left().is_empty() && agent.ledger().records.is_empty());
    lab.call("DEL", &pod, &config(&lab)).good();
    assert_eq!(kernel.counts(), (1, 1), "and once");
}

/// Killed between the two: the function has no driver.
#[test]
fn a_function_that_was_left_without_its_driver_gets_it() {
    let (lab, pod) = (Lab::new(), Pod::new());
    lab.ipam();
    let kernel = Kernel::start(&lab);
    let before = prepared(&lab);
    let agent = FakeAgent::start(&lab.socket(), vec![nic()]);
    lab.call("ADD", &pod, &config(&lab)).good();
    fs::write(kernel.sysfs.join("bus/pci/drivers/vfdrv/unbind"), PCI).unwrap();
    lab::until("it has no driver", || kernel.counts().0 == 1);
    lab.call("DEL", &pod, &config(&lab)).good();
    assert_eq!((settings(&lab), kernel.counts()), (before, (1, 1)));
    assert!(agent.ledger().records.is_empty());
}

#[test]
fn one_that_its_driver_does_not_take_again_stays_written_down() {
    let (lab, pod) = (Lab::new(), Pod::new());
    lab.ipam();
    let kernel = Kernel::start(&lab);
    let before = prepared(&lab);
    let agent = FakeAgent::start(&lab.socket(), vec![nic()]);
    lab.call("ADD", &pod, &config(&lab)).good();
    kernel.shared.takes.store(false, Ordering::Relaxed);
    let answer = lab.call("DEL", &pod, &config(&lab));
    assert_eq!(answer.code(), 11, "{answer:?}");
    assert!(answer.document["msg"].as_str().unwrap().contains("vfdrv does not take"), "{answer:?}");
    assert_eq!(agent.ledger().records.len(), 1);
    kernel.shared.takes.store(true, Ordering::Relaxed);
    lab.call("DEL", &pod, &config(&lab)).good();
    assert_eq!(settings(&lab), before);
    assert!(agent.ledger().records.is_empty());
}

/// Where it cannot be made as new it is taken back as it is; no driver is taken from a function
/// that would not get it again.
#[test]
fn where_it_cannot_be_it_is_not_half_done() {
    type Spoil = fn(&Path);
    let spoils: [(Spoil, &str); 4] = [
        // As in a container, where sysfs is read-only.
        (|sysfs| fs::remove_file(sysfs.join("bus/pci/drivers_probe")).unwrap(), "drivers_probe"),
        (|sysfs| fs::remove_file(sysfs.join("bus/pci/drivers/vfdrv/unbind")).unwrap(), "unbind"),
        (
            |sysfs| fs::write(device(sysfs).join("physfn/sriov_drivers_autoprobe"), "0\n").unwrap(),
            "autoprobe",
        ),
        (
            |sysfs| fs::write(device(sysfs).join("sriov_numvfs"), "4\n").unwrap(),
            "functions of its own",
        ),
    ];
    for (spoil, why) in spoils {
        let (lab, pod) = (Lab::new(), Pod::new());
        lab.ipam();
        let kernel = Kernel::start(&lab);
        let (before, old) = (prepared(&lab), index(&lab));
        let agent = FakeAgent::start(&lab.socket(), vec![nic()]);
        lab.call("ADD", &pod, &config(&lab)).good();
        // Nobody reads what is gone.
        let (sysfs, counts) = (kernel.sysfs.clone(), Arc::clone(&kernel.shared));
        drop(kernel);
        spoil(&sysfs);
        let answer = lab.call("DEL", &pod, &config(&lab));
        assert!(answer.code() == 0 && answer.stderr.contains(why), "{why}: {answer:?}");
        assert_eq!((settings(&lab), index(&lab)), (before, old), "{why}");
        assert_eq!(counts.unbound.load(Ordering::Relaxed), 0);
        assert_eq!(
            fs::read_to_string(sysfs.join("bus/pci/drivers/vfdrv/unbind")).unwrap_or_default(),
            ""
        );
        assert!(agent.ledger().records.is_empty());
    }
}

/// What the host uses by now, or gave to user space, is not taken from under it.
#[test]
fn a_function_that_is_somebody_elses_by_now_is_left_alone() {
    let (lab, pod) = (Lab::new(), Pod::new());
    lab.ipam();
    let kernel = Kernel::start(&lab);
    prepared(&lab);
    let agent = FakeAgent::start(&lab.socket(), vec![nic()]);
    let records = |lab: &Lab| {
        lab.call("ADD", &pod, &config(lab)).good();
        let records = agent.ledger().records.clone();
        lab.call("DEL", &pod, &config(lab)).good();
        records
    };
    let stale = records(&lab);
    assert_eq!(kernel.counts(), (1, 1));
    let mut host = Links::open_in(&lab.host).unwrap();
    let bridge = host.by_name("br0").unwrap().index;
    host.set_master(index(&lab), Some(bridge)).unwrap();
    agent.ledger().records = stale.clone();
    let answer = lab.call("DEL", &pod, &config(&lab));
    assert!(answer.code() == 0 && answer.stderr.contains("port of"), "{answer:?}");
    host.set_master(index(&lab), None).unwrap();
    fs::remove_file(device(&kernel.sysfs).join("driver")).unwrap();
    symlink("/x/vfio-pci", device(&kernel.sysfs).join("driver")).unwrap();
    agent.ledger().records = stale;
    lab.call("DEL", &pod, &config(&lab)).good();
    assert_eq!(kernel.counts(), (1, 1));
}

/// Of two DELs, the runtime's and its agent's, one waits for the other. When its turn comes the
/// function may be the next pod's.
#[test]
fn a_del_that_waited_undoes_nothing_that_is_undone() {
    let (lab, pod) = (Lab::new(), Pod::new());
    lab.ipam();
    let kernel = Kernel::start(&lab);
    prepared(&lab);
    let agent = FakeAgent::start(&lab.socket(), vec![nic()]);
    lab.call("ADD", &pod, &config(&lab)).good();
    agent.ledger().requests.clear();
    let held = lab.hold("vf-0");
    let variables = lab::variables("DEL", &pod.path, "eth1", lab.dir.path().to_str().unwrap());
    let late = lab.start(&variables, config(&lab).to_string().as_bytes());
    lab::until_detach(&agent);
    agent.ledger().records.clear();
    drop(held);
    lab::answer(late).good();
    assert_eq!(kernel.counts(), (0, 0), "it is somebody else's by now");
}
