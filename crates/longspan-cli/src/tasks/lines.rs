//! Lines of a person's file.

use anyhow::{Result, anyhow};

/// A line as text, or an error that says where it is not UTF-8.
pub fn utf8<'a>(line: &'a [u8], at: &str) -> Result<&'a str> {
    std::str::from_utf8(line).map_err(|error| {
        let byte = error.valid_up_to();
        anyhow!(
            "{at}, byte {}: invalid UTF-8 (0x{:02x}); convert the file, such as with `iconv -f latin1 -t utf8`",
            byte + 1,
            line[byte]
        )
    })
}
