//! Files that are believed only if they are whole: a header, a checksum, and one line of JSON.
//!
//! ```text
//!   vhost-rdma-agent-node 1
//!   7d0a36c1 {"uid":"…","generation":3,"spec":{…},"hosted":{…}}    CRC-32 of the rest of the line
//! ```
//!
//! Each is replaced as a whole (a new file, `fsync`, `rename`, `fsync` of the directory). A damaged
//! one is an error and says nothing: who wrote it decides what then holds.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// A file of one kind.
#[derive(Debug, Clone)]
pub struct Sealed {
    dir: PathBuf,
    name: &'static str,
    header: &'static str,
    most: u64,
}

impl Sealed {
    /// The file of this name in a directory. One of more than `most` bytes was not written by us.
    #[must_use]
    pub fn new(dir: &Path, name: &'static str, header: &'static str, most: u64) -> Self {
        Self { dir: dir.to_owned(), name, header, most }
    }

    /// What it says, if there is one.
    ///
    /// # Errors
    /// It cannot be read, or is damaged.
    pub fn read<T: DeserializeOwned>(&self) -> io::Result<Option<T>> {
        let file = match File::open(self.dir.join(self.name)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut text = String::new();
        file.take(self.most).read_to_string(&mut text)?;
        self.parse(&text).map(Some).map_err(|why| io::Error::new(io::ErrorKind::InvalidData, why))
    }

    /// Replaces it; when this returns it is on the disk. Only its owner can read it.
    ///
    /// # Errors
    /// The disk is full or broken; the old one stays, or a crash may bring it back.
    pub fn write<T: Serialize>(&self, content: &T) -> io::Result<()> {
        let json = serde_json::to_string(content)?;
        let text = format!("{}{:08x} {json}\n", self.header, crc32fast::hash(json.as_bytes()));
        if text.len() as u64 > self.most {
            return Err(io::Error::other(format!("more than {} bytes", self.most)));
        }
        std::fs::create_dir_all(&self.dir)?;
        // Before anything is in place: there may be no descriptor left for it afterwards.
        let dir = File::open(&self.dir)?;
        let new = self.dir.join(format!("{}.new", self.name));
        let placed = (|| {
            let mut options = File::options();
            let mut file =
                options.write(true).create(true).truncate(true).mode(0o600).open(&new)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            std::fs::rename(&new, self.dir.join(self.name))
        })();
        if placed.is_err() {
            // The ledger beside it may need the room.
            let _ = std::fs::remove_file(&new);
        }
        placed?;
        dir.sync_all()
    }

    fn parse<T: DeserializeOwned>(&self, text: &str) -> Result<T, String> {
        let body = text.strip_prefix(self.header).ok_or("it does not begin as it should")?;
        let body = body.strip_suffix('\n').ok_or("it ends too early")?;
        let (sum, json) = body.split_once(' ').ok_or("it has no checksum")?;
        let said = u32::from_str_radix(sum, 16).map_err(|_| "its checksum is no number")?;
        if said != crc32fast::hash(json.as_bytes()) {
            return Err("its checksum is wrong".to_owned());
        }
        serde_json::from_str(json).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::Sealed;

    #[test]
    fn what_was_not_put_in_place_takes_no_room() {
        let dir = tempfile::tempdir().unwrap();
        let file = Sealed::new(dir.path(), "node", "node 1\n", 1000);
        std::fs::create_dir(dir.path().join("node")).unwrap();
        file.write(&"one").unwrap_err();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        std::fs::remove_dir(dir.path().join("node")).unwrap();
        file.write(&"two").unwrap();
        assert_eq!(file.read::<String>().unwrap().as_deref(), Some("two"));
    }
}
