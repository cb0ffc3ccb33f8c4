//! Quantities with their units, as people read them.

/// Three digits of `x` under a unit.
fn three(x: f64, unit: &str) -> String {
    let digits = match x.abs() {
        x if x >= 99.95 => 0,
        x if x >= 9.995 => 1,
        _ => 2,
    };
    format!("{x:.digits$} {unit}")
}

/// Seconds, such as `12.3 ms`.
pub fn time(seconds: f64) -> String {
    match seconds {
        x if x >= 0.9995 => three(x, "s"),
        x if x >= 0.9995e-3 => three(x * 1e3, "ms"),
        x if x >= 0.9995e-6 => three(x * 1e6, "µs"),
        x => three(x * 1e9, "ns"),
    }
}

/// Bytes in decimal units, such as `1.23 MB`.
pub fn bytes(bytes: f64) -> String {
    match bytes {
        x if x >= 999.5e6 => three(x / 1e9, "GB"),
        x if x >= 999.5e3 => three(x / 1e6, "MB"),
        x if x >= 999.5 => three(x / 1e3, "kB"),
        x => format!("{x:.0} B"),
    }
}

/// A rate in `GFLOP/s`.
pub fn flop_rate(rate: f64) -> String {
    three(rate / 1e9, "GFLOP/s")
}

/// A length in tokens with a comma every three digits.
pub fn tokens(length: usize) -> String {
    let digits = length.to_string();
    let mut text = String::new();
    for (n, digit) in digits.chars().enumerate() {
        if n > 0 && (digits.len() - n).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// How many times: `12 ×`, `3.4 ×`.
pub fn times(ratio: f64) -> String {
    if ratio >= 9.95 { format!("{ratio:.0} ×") } else { format!("{ratio:.1} ×") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_carry_their_units() {
        assert_eq!(time(1.234), "1.23 s");
        assert_eq!(time(0.9999), "1.00 s");
        assert_eq!(time(12.34e-3), "12.3 ms");
        assert_eq!(time(123.4e-6), "123 µs");
        assert_eq!(time(5e-9), "5.00 ns");
        assert_eq!(bytes(520_000.0), "520 kB");
        assert_eq!(bytes(2e6), "2.00 MB");
        assert_eq!(bytes(12.0), "12 B");
        assert_eq!(flop_rate(113.4e9), "113 GFLOP/s");
        assert_eq!(tokens(262_144), "262,144");
        assert_eq!(tokens(512), "512");
        assert_eq!((times(9.94), times(40.2)), ("9.9 ×".into(), "40 ×".into()));
    }
}
