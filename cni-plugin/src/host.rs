//! Where things are on this host: said by the host alone, never by a network configuration.
//!
//! The plugin is root and does what the node agent answers. A NetworkAttachmentDefinition is
//! written by a tenant, and so is everything in the network configuration that comes of it,
//! `runtimeConfig` included (libcni leaves a literal one in place when the runtime has no
//! capability arguments). So the agent's socket and the directory of device information files are
//! constants. A host that has them elsewhere says so in the environment of its runtime, which only
//! root sets: libcni adds the `CNI_` variables to its own environment and takes none from a
//! configuration, and Multus' daemon takes only `CNI_` ones from its shim.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags};
use vhost_rdma_agent_api::{CHECKPOINT, DEFAULT_SOCKET, RESOURCES, SOCKET_ENV, checkpoint};

/// Where Multus has plugins write device information (device-info-spec 1.1.0, section 4.2).
const DEVICE_INFO: &str = "/var/run/k8s.cni.cncf.io/devinfo/cni";
/// The variable that names another directory than [`DEVICE_INFO`].
const DEVICE_INFO_ENV: &str = "VHOST_RDMA_DEVICE_INFO_DIR";
/// Where the kubelet has its checkpoint.
const KUBELET_PLUGINS: &str = "/var/lib/kubelet/device-plugins";
/// The variable that names another directory than [`KUBELET_PLUGINS`].
const KUBELET_PLUGINS_ENV: &str = "VHOST_RDMA_KUBELET_PLUGINS";
/// Where the kernel shows devices.
const SYSFS: &str = "/sys";
/// The variable that names another directory than [`SYSFS`].
const SYSFS_ENV: &str = "VHOST_RDMA_SYSFS";
/// The longest name of a file.
const NAME_MAX: usize = 255;

/// The host's own paths.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Where the node agent listens.
    pub agent: PathBuf,
    /// The one directory in which device information files are written.
    pub device_info: PathBuf,
    /// The kubelet's plugin directory, with its checkpoint.
    pub kubelet_plugins: PathBuf,
    /// Where the kernel shows devices.
    pub sysfs: PathBuf,
}

impl Default for Host {
    fn default() -> Self {
        Self {
            agent: DEFAULT_SOCKET.into(),
            device_info: DEVICE_INFO.into(),
            kubelet_plugins: KUBELET_PLUGINS.into(),
            sysfs: SYSFS.into(),
        }
    }
}

impl Host {
    /// As the environment of this process says; a value that is no absolute path counts as none.
    #[must_use]
    pub fn of_process() -> Self {
        let path = |name: &str, usual: PathBuf| {
            std::env::var_os(name)
                .map(PathBuf::from)
                .filter(|path| path.is_absolute())
                .unwrap_or(usual)
        };
        let Self { agent, device_info, kubelet_plugins, sysfs } = Self::default();
        Self {
            agent: path(SOCKET_ENV, agent),
            device_info: path(DEVICE_INFO_ENV, device_info),
            kubelet_plugins: path(KUBELET_PLUGINS_ENV, kubelet_plugins),
            sysfs: path(SYSFS_ENV, sysfs),
        }
    }

    /// The directory of the locks, beside the agent's socket: root's, and gone after a reboot.
    pub(crate) fn locks(&self) -> PathBuf {
        self.agent.parent().unwrap_or(Path::new("/run")).join("locks")
    }

    /// May a pod have a NIC of ours, as far as can be told without the agent?
    ///
    /// The kubelet's checkpoint is written before a pod's network is made and has each of its
    /// devices under its UID. What of it is ours is in a file that the agent left; where there is
    /// none (the node has just started), any device may be.
    pub(crate) fn may_have_nic(&self, uid: Option<&str>) -> bool {
        let Some(uid) = uid else { return true };
        let devices = match std::fs::read(self.kubelet_plugins.join(CHECKPOINT)) {
            Ok(text) => match checkpoint(&text) {
                Some(devices) => devices,
                None => return true,
            },
            // The kubelet writes it when the first plugin registers: until then nobody has a
            // device.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return !self.kubelet_plugins.is_dir();
            }
            Err(_) => return true,
        };
        let dir = self.agent.parent().unwrap_or(Path::new("/run"));
        let ours = std::fs::read_to_string(dir.join(RESOURCES)).ok();
        let is_ours = |resource: &str| {
            ours.as_ref().is_none_or(|ours| ours.lines().any(|ours| ours == resource))
        };
        devices.iter().any(|((resource, _), holder)| holder == uid && is_ours(resource))
    }

    /// Which file of the one directory a `CNIDeviceInfoFile` means; `None` if it means anything
    /// else.
    ///
    /// Multus' names hold the container's ID (`<network>-<container>_<interface>`), which nobody
    /// else can guess: a name without it would be another pod's file.
    pub(crate) fn device_info_name(&self, file: &Path, container: &str) -> Option<String> {
        let name = file.file_name()?.to_str()?;
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        let is_plain = name.len() <= NAME_MAX && !name.starts_with('.') && name.bytes().all(plain);
        // `/var/run` is `/run` wherever systemd is.
        let same = |dir: &Path| {
            let short = |path: &Path| {
                path.strip_prefix("/var/run")
                    .map_or_else(|_| path.into(), |p| Path::new("/run").join(p))
            };
            short(dir) == short(&self.device_info)
        };
        // Compared byte by byte: `Path` would take `a/./b` and `a//b` for `a/b`, which is harmless
        // and not Multus'.
        let whole = file.parent().filter(|dir| same(dir))?.join(name);
        (is_plain && name.contains(container) && whole.as_os_str() == file.as_os_str())
            .then(|| name.to_owned())
    }

    /// Writes a device information file, all or nothing.
    ///
    /// The directory must be root's alone. Inside it only one new name is opened (`O_EXCL`, no link
    /// is followed) and renamed, both relative to the open directory, so nothing that happens to
    /// the path meanwhile leads elsewhere.
    ///
    /// # Errors
    /// The directory is somebody's who is not root, or the file system says no.
    pub(crate) fn write_device_info(&self, name: &str, text: &str) -> io::Result<()> {
        std::fs::create_dir_all(&self.device_info)?;
        let dir = roots_own(&self.device_info)?;
        let beside = format!(".{}.new", std::process::id());
        let flags =
            OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        // What a plugin with this process number left when it was killed.
        let _ = rustix::fs::unlinkat(&dir, &beside, AtFlags::empty());
        let file = rustix::fs::openat(&dir, &beside, flags, Mode::from_raw_mode(0o644))?;
        let written = File::from(file)
            .write_all(text.as_bytes())
            .and_then(|()| Ok(rustix::fs::renameat(&dir, &beside, &dir, name)?));
        if written.is_err() {
            // The first failure is the one to tell.
            let _ = rustix::fs::unlinkat(&dir, &beside, AtFlags::empty());
        }
        written
    }
}

/// Opens a directory that belongs to root (or to whom this runs as) and that nobody else may write
/// to.
fn roots_own(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    let dir = rustix::fs::open(path, flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&dir)?;
    let owned = stat.st_uid == 0 || stat.st_uid == rustix::process::geteuid().as_raw();
    if owned && stat.st_mode & 0o022 == 0 {
        return Ok(dir);
    }
    let why = format!("{} is not a directory of root's alone", path.display());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    use std::path::Path;

    use super::Host;

    #[test]
    fn only_a_plain_name_with_the_containers_id_in_the_one_directory_is_meant() {
        let host = Host::default();
        let dir = "/var/run/k8s.cni.cncf.io/devinfo/cni";
        let name = |file: &str| host.device_info_name(Path::new(file), "c0ffee");
        assert_eq!(name(&format!("{dir}/net-c0ffee_net1")).as_deref(), Some("net-c0ffee_net1"));
        let short = "/run/k8s.cni.cncf.io/devinfo/cni/net-c0ffee_net1";
        assert_eq!(name(short).as_deref(), Some("net-c0ffee_net1"));
        for file in [
            "/etc/cron.d/c0ffee".to_owned(),
            format!("{dir}/net-other_net1"),
            format!("{dir}/../c0ffee"),
            format!("{dir}/../cni/c0ffee"),
            format!("{dir}/sub/c0ffee"),
            format!("{dir}/.c0ffee"),
            format!("{dir}/c0ffee x"),
            format!("{dir}//c0ffee"),
            format!("{dir}/c0ffee/"),
            format!("{dir}/{}c0ffee", "x".repeat(250)),
            "c0ffee".to_owned(),
        ] {
            assert_eq!(name(&file), None, "{file}");
        }
    }

    #[test]
    fn without_the_agent_the_kubelets_checkpoint_says_who_may_have_a_nic() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host {
            agent: dir.path().join("agent.sock"),
            kubelet_plugins: dir.path().join("plugins"),
            ..Host::default()
        };
        assert!(host.may_have_nic(Some("u")), "there is no such directory");
        std::fs::create_dir(&host.kubelet_plugins).unwrap();
        assert!(!host.may_have_nic(Some("u")), "nobody has a device");
        let file = host.kubelet_plugins.join("kubelet_internal_checkpoint");
        std::fs::write(&file, "junk").unwrap();
        assert!(host.may_have_nic(Some("u")), "nobody knows");
        let text = r#"{"Data":{"PodDeviceEntries":[
            {"PodUID":"ours","ResourceName":"vhost-rdma.io/blue","DeviceIDs":{"-1":["blue-0"]}},
            {"PodUID":"gpu","ResourceName":"example.com/gpu","DeviceIDs":["gpu-0"]}]}}"#;
        std::fs::write(&file, text).unwrap();
        assert!(host.may_have_nic(None) && host.may_have_nic(Some("ours")));
        assert!(host.may_have_nic(Some("gpu")) && !host.may_have_nic(Some("plain")));
        std::fs::write(dir.path().join("resources"), "vhost-rdma.io/blue\n").unwrap();
        assert!(host.may_have_nic(Some("ours")) && !host.may_have_nic(Some("gpu")));
    }

    #[test]
    fn a_file_is_written_in_roots_own_directory_and_no_link_is_followed() {
        let dir = tempfile::tempdir().unwrap();
        let device_info = dir.path().join("devinfo");
        let host = Host { device_info: device_info.clone(), ..Host::default() };
        let victim = dir.path().join("victim");
        std::fs::write(&victim, "precious").unwrap();
        host.write_device_info("a", "1").unwrap();
        std::fs::remove_file(device_info.join("a")).unwrap();
        symlink(&victim, device_info.join("a")).unwrap();
        host.write_device_info("a", "2").unwrap();
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
        assert_eq!(std::fs::read_to_string(device_info.join("a")).unwrap(), "2");
        assert_eq!(std::fs::read_dir(&device_info).unwrap().count(), 1);
        std::fs::set_permissions(&device_info, std::fs::Permissions::from_mode(0o777)).unwrap();
        let refused = host.write_device_info("b", "3").unwrap_err();
        assert!(refused.to_string().contains("root's alone"), "{refused}");
    }
}
