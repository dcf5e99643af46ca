//! Names of interfaces beside their own.
//!
//! An interface can have many (`ip link property add … altname`). They go along when it goes to
//! another namespace, one that is taken there keeps it from going (`__dev_change_net_namespace`),
//! and an interface is found by them as by its own. Whoever has NET_ADMIN in a namespace gives an
//! interface there any that is free in that namespace. So what comes from a pod brings none along,
//! and those that the host had given are written down and given again.

use std::ffi::OsStr;

use cni_skel::Error;
use rdma_netlink::Netns;
use rdma_netlink::link::{Link, Links};

use crate::pod::{self, netlink};

/// How many of the host's are kept: systemd gives five or six.
pub(crate) const KEPT: usize = 32;
/// How often a pod may give a name anew while its function is taken back.
const TRIES: u32 = 16;

/// What the host has given, to be written down.
pub(crate) fn of(link: &Link) -> Vec<String> {
    link.altnames.iter().filter_map(|name| name.to_str()).take(KEPT).map(str::to_owned).collect()
}

/// Takes away all but these.
pub(crate) fn clear(links: &mut Links, link: &Link, but: &[String]) -> Result<(), Error> {
    for name in link.altnames.iter().filter(|name| !but.iter().any(|kept| **name == **kept)) {
        delete(links, link.index, name)?;
    }
    Ok(())
}

/// Gives back what the host had given. What another has by now stays with it.
pub(crate) fn restore(links: &mut Links, link: &Link, names: &[String]) -> Result<(), Error> {
    for name in names.iter().take(KEPT).map(OsStr::new) {
        match links.add_altname(link.index, name) {
            Err(error) if !error.is_exists() => return Err(netlink(error)),
            _ => {}
        }
    }
    Ok(())
}

/// Makes sure that no interface is called so beside its own name: the name is a function's own.
pub(crate) fn make_way(links: &mut Links, name: &str) -> Result<(), Error> {
    match links.by_name(name) {
        Ok(link) if link.name != name => delete(links, link.index, OsStr::new(name)),
        Err(error) if !error.is_not_found() => Err(netlink(error)),
        _ => Ok(()),
    }
}

/// Takes a netdev from a pod to the host under its name; if another has that name, under one of
/// ours, so that the namespace can go.
pub(crate) fn bring(
    pod: &mut Links,
    link: &Link,
    host: &Netns,
    host_name: &str,
) -> Result<(), Error> {
    let ours = pod::name("vn", host_name, &link.name);
    let mut outside = Links::open_in(host).map_err(netlink)?;
    let mut tries = 0;
    loop {
        let now = pod.by_index(link.index).map_err(netlink)?;
        clear(pod, &now, &[])?;
        let mut moved = Ok(());
        for name in [host_name, &ours] {
            make_way(&mut outside, name)?;
            moved = pod.move_to(link.index, host, Some(name));
            if !moved.as_ref().is_err_and(rdma_netlink::Error::is_exists) {
                return moved.map_err(netlink);
            }
        }
        tries += 1;
        if tries == TRIES {
            return moved.map_err(netlink);
        }
    }
}

fn delete(links: &mut Links, index: u32, name: &OsStr) -> Result<(), Error> {
    match links.delete_altname(index, name) {
        Err(error) if !error.is_not_found() => Err(netlink(error)),
        _ => Ok(()),
    }
}
