//! Reads files that the operator has named.

use std::{
    fs::{self, File},
    io::{self, ErrorKind, Read},
    path::Path,
};

/// Maximum size. A larger file is not what the operator has meant.
const MAX_BYTES: u64 = 16 << 20;

/// Returns the content. Fails if the file is not a regular one, because the read of a pipe or device may never end, or
/// has more than [`MAX_BYTES`].
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::new(ErrorKind::InvalidInput, "not a regular file"));
    }
    let mut content = Vec::new();
    let length = File::open(path)?.take(MAX_BYTES + 1).read_to_end(&mut content)?;
    if length as u64 > MAX_BYTES {
        let why = format!("more than {MAX_BYTES} bytes");
        return Err(io::Error::new(ErrorKind::FileTooLarge, why));
    }
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_an_end_is_an_error() {
        for path in ["/dev/zero", "/dev/null", "/"] {
            let error = read(Path::new(path)).expect_err(path);
            assert_eq!(error.to_string(), "not a regular file");
        }
    }

    #[test]
    fn the_size_is_limited() {
        let path = std::env::temp_dir().join(format!("mla-router-file-{}", std::process::id()));
        let file = File::create(&path).expect("a place for temporary files");
        let with = |length| {
            file.set_len(length).expect("a sparse file");
            read(&path)
        };
        assert_eq!(with(3).expect("small"), [0; 3]);
        let error = with(MAX_BYTES + 1).expect_err("large");
        assert_eq!(error.to_string(), "more than 16777216 bytes");
        fs::remove_file(path).expect("there");
    }
}
