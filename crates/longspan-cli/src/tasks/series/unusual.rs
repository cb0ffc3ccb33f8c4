//! What is unusual about series, and may be a mistake.

use super::file::Series;
use crate::terminal::notes::{note, note_some};
use crate::terminal::samples::counted;

/// So many different values are no classes.
pub const DIFFERENT: usize = 10;

/// Up to it a double holds all whole numbers.
const LARGEST: f64 = 9_007_199_254_740_992.0;

/// Says what is unusual about times and values.
pub fn say_unusual(name: &str, all: &[Series]) {
    let count = |holds: fn(&Series) -> bool| all.iter().filter(|one| holds(one)).count();
    note_some(count(|one| one.backwards), |some| {
        format!("{name}: times that run backwards in {some} series; points are sorted")
    });
    let is_rounded = |one: &&Series| one.repeats && one.times.iter().any(|time| time.abs() > LARGEST);
    let kept = match all.iter().find(is_rounded) {
        Some(_) => format!("those beyond {LARGEST} are rounded: count from a later start"),
        None => "all are kept".into(),
    };
    note_some(count(|one| one.repeats), |some| format!("{name}: several points at one time in {some} series; {kept}"));
    let far = |one: &Series| {
        let (times, last) = (&one.times, one.times.len() - 1);
        let is_far = |(far, near): &(usize, usize)| 2.0 * (times[*far] - times[*near]).abs() > times[last] - times[0];
        let (far, _) = [(0, 1), (last, last - 1)].into_iter().find(is_far)?;
        Some(one.time(times[far]))
    };
    if let Some(date) = all.iter().filter(|one| one.dates.is_some() && one.times.len() > DIFFERENT).find_map(far) {
        note(format_args!(
            "{name}: {date} is further from all other dates than those are from one another; if it says that none is known, leave the row out"
        ));
    }
    codes(all)
        .iter()
        .for_each(|code| note(format_args!("{name}: {code}; if it says that a value is missing, leave it empty")));
}

/// Numbers that may stand for missing values: the least or the greatest, further off than all others from one another, which come again or
/// are all nines, such as -999; and zeros at the end of a series that has no others.
fn codes(all: &[Series]) -> Vec<String> {
    let mut found = Vec::new();
    for channel in 0..all.first().map_or(0, |one| one.width) {
        let of = all[0].names.get(channel).map_or(String::new(), |name| format!(" of `{name}`"));
        let values = |one: &'_ Series| -> Vec<f64> {
            let values = one.values.iter().skip(channel).step_by(one.width).copied();
            values.filter(|value| !value.is_nan()).collect()
        };
        let before = found.len();
        let mut sorted: Vec<f64> = all.iter().flat_map(values).collect();
        sorted.sort_by(f64::total_cmp);
        for code in sorted.first().into_iter().chain(sorted.last()).copied() {
            let mut others: Vec<f64> = sorted.iter().copied().filter(|value| *value != code).collect();
            let count = sorted.len() - others.len();
            others.dedup();
            let (Some(&low), Some(&high)) = (others.first(), others.last()) else { continue };
            let is_nines = code.abs() >= 99.0 && (code.abs() + 1.0).log10().fract() == 0.0;
            let is_code = is_nines || count > 1 && others.len() >= DIFFERENT;
            if is_code && low < high && (low - code).max(code - high) > high - low {
                found.push(format!("{}{of}: {code}, the others from {low} to {high}", counted(count, "values")));
            }
        }
        let zeros_at_end = |one: &Series| {
            let values = values(one);
            let others = values.iter().rposition(|value| *value != 0.0)? + 1;
            let are_all = !values[..others].contains(&0.0);
            (values.len() > others + 1 && others >= DIFFERENT && are_all).then(|| values.len() - others)
        };
        if let (Some(count), true) = (all.iter().find_map(zeros_at_end), found.len() == before) {
            found.push(format!("the last {count} points{of} are 0, as no others are"));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::series::file::{Reading, parse};

    #[test]
    fn numbers_that_stand_for_missing_values_are_found() {
        let codes = |text: &str| codes(&parse(text.as_bytes(), "csv", "f", &Reading::default()).unwrap().series);
        assert_eq!(codes("time,x\n0,5\n1,-999\n2,7\n3,-999\n"), ["2 values of `x`: -999, the others from 5 to 7"]);
        let rows = |code: &str| {
            let row = |n| if n % 7 == 3 { format!("{n},{code}\n") } else { format!("{n},{}\n", 20 + n) };
            format!("time,x\n{}", (0..14).map(row).collect::<String>())
        };
        for code in ["-1", "0", "-6999", "100000000000000000000"] {
            assert_eq!(codes(&rows(code)), [format!("2 values of `x`: {code}, the others from 20 to 33")]);
        }
        for other in ["time,x\n0,-990\n1,-999\n2,7\n3,-999\n", "time,x\n0,99\n1,99\n", "time,x\n0,9\n1,0\n2,1\n3,9\n"] {
            assert!(codes(other).is_empty(), "{other}");
        }
        assert!(codes(&rows("10")).is_empty(), "as near as they are wide");
        let ends = |end: &str| {
            format!("time,x\n{}20,0\n21,{end}\n", (0..20).map(|n| format!("{n},{}\n", 7 + n % 11)).collect::<String>())
        };
        assert_eq!(codes(&ends("0"))[..], ["the last 2 points of `x` are 0, as no others are"]);
        assert!(codes(&ends("1")).is_empty());
    }
}
