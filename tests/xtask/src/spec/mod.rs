//! `cargo xtask spec`: docs/virtio-rdma.md as a device section of the virtio specification.
//!
//! The virtio TC writes LaTeX: a device's chapter with its normative statements set apart, and for
//! devices and for drivers a list of them. Four files are made, in the shape of the TC's
//! `device-types/*/`:
//!
//! - `description.tex`: sections 1 to 12, then the clauses of section 13 as normative statements,
//!   without the names of our tests, which are no business of a standard;
//! - `device-conformance.tex` and `driver-conformance.tex`: what conforms to what;
//! - `rdma.tex`: a document of its own around them, which needs nothing of the TC's.
//!
//! `document` knows Markdown and no LaTeX, `latex` the reverse. What the first does not know is an
//! error: nothing is left out in silence.

mod document;
mod latex;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use document::Document;
use lab::exec::{capture, tied, workspace};

const SOURCE: &str = "docs/virtio-rdma.md";
const CHECK: Duration = Duration::from_secs(120);

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Directory for the LaTeX files
    #[arg(default_value = "target/spec")]
    dir: PathBuf,
    /// Also typeset it (pdflatex of texlive-latex-base)
    #[arg(long)]
    pdf: bool,
}

impl Args {
    pub(crate) fn run(&self) -> Result<bool> {
        let path = workspace().join(SOURCE);
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let document = Document::parse(&text)?;
        fs::create_dir_all(&self.dir)
            .with_context(|| format!("cannot make {}", self.dir.display()))?;
        for (name, text) in latex::files(&document)? {
            fs::write(self.dir.join(name), text)?;
            println!("{}", self.dir.join(name).display());
        }
        if self.pdf {
            typeset(&self.dir)?;
            println!("{}", self.dir.join("rdma.pdf").display());
        }
        Ok(true)
    }
}

/// Twice, for the references; whoever has no pdflatex is told by its absence.
fn typeset(dir: &Path) -> Result<()> {
    for _ in 0..2 {
        let mut cmd = tied("pdflatex");
        cmd.current_dir(dir).args(["-interaction=nonstopmode", "-halt-on-error", "rdma.tex"]);
        capture(&mut cmd, CHECK).context("pdflatex (texlive-latex-base) failed")?;
    }
    let log = fs::read(dir.join("rdma.log"))?;
    let log = String::from_utf8_lossy(&log);
    ensure!(!log.contains("undefined references"), "rdma.tex has undefined references");
    Ok(())
}
