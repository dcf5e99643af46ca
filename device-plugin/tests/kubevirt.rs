//! KubeVirt's hook (`manifests/kubevirt/onDefineDomain`) without KubeVirt: what it makes of a
//! libvirt domain is what the daemon's own words for QEMU are, and the guest's memory is shared
//! whatever the domain said of it.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use vhost_rdma_vmm::{Nic, QemuArgs, qemu};

fn hook() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests/kubevirt/onDefineDomain")
}

/// As KubeVirt's shim calls it, in a pod that has these NICs.
fn run(ids: &[&str], domain: &str) -> Output {
    let dir = tempfile::tempdir().unwrap();
    let info = dir.path().join("network-info");
    let one = |id: &&str| {
        format!(
            r#"{{"network":"n-{id}","deviceInfo":{{"type":"vhost-user","version":"1.1.0","vhost-user":{{"mode":"client","path":"/run/vhost-rdma/{id}/vhost.sock"}}}}}}"#
        )
    };
    let all = ids.iter().map(one).collect::<Vec<_>>().join(",");
    std::fs::write(&info, format!(r#"{{"interfaces":[{all}]}}"#)).unwrap();
    let mut command = Command::new("sh");
    command.arg(hook()).args(["--vmi", "{}", "--domain", domain]).env("NETWORK_INFO", &info);
    command.output().unwrap()
}

fn defined(ids: &[&str], domain: &str) -> String {
    let out = run(ids, domain);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

/// The values of `qemu:arg`, in their order.
fn arguments(text: &str) -> Vec<&str> {
    let parts = text.split("<qemu:arg value='").skip(1);
    parts.filter_map(|part| Some(part.split_once('\'')?.0)).collect()
}

const PLAIN: &str = concat!(
    "<domain type=\"kvm\">\n",
    "  <name>a_vm1</name>\n",
    "  <memory unit=\"b\">1073741824</memory>\n",
    "  <devices></devices>\n",
    "</domain>"
);

#[test]
fn the_words_for_qemu_are_the_daemons() {
    let text = defined(&["blue-3", "red-0"], PLAIN);
    let mut wanted = Vec::new();
    for (index, id) in [(0, "blue-3"), (1, "red-0")] {
        let nic = Nic {
            name: id.to_owned(),
            socket: format!("/run/vhost-rdma/{id}/vhost.sock"),
            num_queues: 8,
            ..Nic::default()
        };
        let args = QemuArgs { index, netdev: Some("none".to_owned()), ..QemuArgs::default() };
        wanted.extend(qemu(&nic, &args).unwrap());
    }
    let found = arguments(&text);
    let (bare, addresses): (Vec<&str>, Vec<&str>) =
        found.iter().map(|word| word.split_once(",bus=").unwrap_or((word, ""))).unzip();
    assert_eq!(bare, wanted);
    assert_ne!(addresses[3], addresses[7], "two devices at one PCI address");
    assert!(text.contains("xmlns:qemu=\"http://libvirt.org/schemas/domain/qemu/1.0\""), "{text}");
    assert!(text.trim_end().ends_with("</qemu:commandline></domain>"), "{text}");
    assert!(text.contains("<name>a_vm1</name>"), "{text}");
}

#[test]
fn the_guests_memory_is_shared_whatever_was_said_of_it() {
    let with = |backing: &str| PLAIN.replace("</memory>", &format!("</memory>{backing}"));
    for backing in [
        "",
        "<memoryBacking/>",
        "<memoryBacking></memoryBacking>",
        "<memoryBacking><hugepages></hugepages></memoryBacking>",
        "<memoryBacking><access mode=\"private\"/></memoryBacking>",
        "<memoryBacking><source type=\"memfd\"/><access mode=\"shared\"/></memoryBacking>",
    ] {
        let text = defined(&["blue-0"], &with(backing));
        let shared = text.matches("<access mode='shared'/>").count()
            + text.matches("<access mode=\"shared\"/>").count();
        assert_eq!((shared, text.matches("private").count()), (1, 0), "{backing}: {text}");
        assert_eq!(text.matches("<memoryBacking>").count(), 1, "{backing}: {text}");
        assert!(!backing.contains("hugepages") || text.contains("<hugepages>"), "{text}");
    }
}

#[test]
fn what_the_domain_had_for_qemu_stays() {
    let had = "<domain type=\"kvm\" xmlns:qemu=\"http://libvirt.org/schemas/domain/qemu/1.0\">\
               <memory>1</memory>\
               <qemu:commandline><qemu:arg value='-foo'/></qemu:commandline></domain>";
    let text = defined(&["blue-0"], had);
    assert_eq!(arguments(&text)[0], "-foo");
    assert_eq!(arguments(&text).len(), 5, "{text}");
    assert_eq!(text.matches("xmlns:qemu").count(), 1, "{text}");
}

#[test]
fn a_pod_without_our_nics_is_told_why_its_vm_does_not_start() {
    for ids in [&[][..], &["../../etc", "b&c", "d'e"]] {
        let out = run(ids, PLAIN);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(1), "{said}");
        assert!(said.contains("names no vhost-rdma NIC"), "{said}");
    }
}
