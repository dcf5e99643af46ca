//! The shared heap of programs with NICs for processes (`process/heap`), as a program meets it that
//! has it preloaded: `tests/guest-programs/process-heap.c`, which needs no device.

// clippy.toml allows this in tests, but does not see that helpers of an integration test are tests
// too.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Longer than any case takes.
const WAIT: Duration = Duration::from_secs(100);

/// A library whose calls of descriptors allocate, which stand in the place of the C library's.
const WRAPPERS: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void use(void)
{
	static void *volatile block;

	block = malloc(100);
	free(block);
}

int fcntl(int fd, int cmd, ...)
{
	va_list args;
	long arg;

	va_start(args, cmd);
	arg = va_arg(args, long);
	va_end(args);
	use();
	return REAL(fcntl)(fd, cmd, arg);
}

int close(int fd) { use(); return REAL(close)(fd); }
int ftruncate(int fd, off_t len) { use(); return REAL(ftruncate)(fd, len); }
int fstat(int fd, struct stat *st) { use(); return REAL(fstat)(fd, st); }
off_t lseek(int fd, off_t at, int whence) { use(); return REAL(lseek)(fd, at, whence); }
int memfd_create(const char *name, unsigned int flags)
{
	use();
	return REAL(memfd_create)(name, flags);
}
ssize_t pwrite(int fd, const void *from, size_t len, off_t at)
{
	use();
	return REAL(pwrite)(fd, from, len, at);
}
ssize_t write(int fd, const void *from, size_t len)
{
	use();
	return REAL(write)(fd, from, len);
}
"#;

fn compile(args: &[&str], sources: &[PathBuf], output: &Path) {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut command = Command::new(compiler);
    command.args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror"]).args(args);
    let status = command.arg("-o").arg(output).args(sources).args(["-lpthread", "-ldl"]).status();
    assert!(status.unwrap().success(), "{command:?}");
}

/// What is made once.
struct Made {
    library: PathBuf,
    program: PathBuf,
    /// Of [`WRAPPERS`].
    wrappers: PathBuf,
}

fn made() -> &'static Made {
    static MADE: OnceLock<Made> = OnceLock::new();
    MADE.get_or_init(|| {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap().keep();
        let (library, program) = (place.join("libvhost_rdma_heap.so"), place.join("process-heap"));
        let sources = ["heap.c", "pages.c"].map(|name| here.join("process/heap").join(name));
        // As build.sh does.
        let shared = ["-fPIC", "-shared", "-fvisibility=hidden", "-fno-builtin"];
        compile(&shared, &sources, &library);
        let source = here.join("../tests/guest-programs/process-heap.c");
        compile(&[], &[source], &program);
        let (source, wrappers) = (place.join("wrappers.c"), place.join("wrappers.so"));
        std::fs::write(&source, WRAPPERS).unwrap();
        compile(&["-fPIC", "-shared"], &[source], &wrappers);
        Made { library, program, wrappers }
    })
}

fn case(name: &str) {
    preloaded(name, &[&made().library]);
}

fn preloaded(name: &str, libraries: &[&PathBuf]) {
    let mut command = Command::new(&made().program);
    let all: Vec<_> = libraries.iter().map(|path| path.as_os_str()).collect();
    command.arg(name).env("LD_PRELOAD", all.join(std::ffi::OsStr::new(":")));
    command.env_remove("VHOST_RDMA_SHARED_HEAP").stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let begin = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begin.elapsed() > WAIT {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let said = child.wait_with_output().unwrap();
    let out = String::from_utf8_lossy(&said.stdout);
    let good = said.status.success() && out == format!("ok {name}\n");
    assert!(good, "{out}{}", String::from_utf8_lossy(&said.stderr));
}

#[test]
fn half_of_the_heap_and_more_is_one_block() {
    case("large");
}

#[test]
fn what_the_heap_has_no_room_for_comes_from_the_c_library() {
    case("beyond");
    case("both-kinds");
}

#[test]
fn freed_blocks_serve_blocks_of_other_sizes() {
    case("reuse");
}

#[test]
fn freed_memory_is_given_back() {
    case("churn");
}

#[test]
fn calloc_gives_zeroes() {
    case("zeroes");
}

#[test]
fn alignments_are_kept() {
    case("aligned");
}

#[test]
fn threads_free_each_others_blocks() {
    case("threads");
}

#[test]
fn a_child_has_a_copy_of_what_is_in_use_and_of_nothing_else() {
    case("forks");
    case("forks-beside-threads");
    case("forks-without-a-file");
}

#[test]
fn a_descriptor_that_is_anothers_by_now_is_left_alone() {
    case("closed");
}

#[test]
fn what_is_preloaded_beside_it_may_allocate_in_calls_of_descriptors() {
    let Made { library, wrappers, .. } = made();
    for order in [[wrappers, library], [library, wrappers]] {
        for name in ["large", "reuse", "forks", "forks-without-a-file", "closed"] {
            preloaded(name, &order);
        }
    }
}

#[test]
fn where_the_heap_is_not_to_be_malloc_is_what_it_was() {
    case("off");
    case("limits");
}
