//! What is unusual about series, and may be a mistake.

use std::collections::HashMap;

use super::file::Series;
use crate::tasks::labels::alike;
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
    let mut ids = HashMap::new();
    let mut twins =
        all.iter().filter_map(|one| one.id.as_ref()).filter_map(|id| Some([ids.insert(alike(id), id)?, id]));
    let twins = twins.find(|[a, b]| a != b);
    let said = [
        twins.map(|[a, b]| format!("the ids {a:?} and {b:?} look alike, and are two series")),
        sum_of_others(all).map(|id| {
            format!("the series {id:?} is the sum of others; take its rows out, unless it is to be predicted too")
        }),
        all.iter().find_map(jump).map(|jump| format!("{jump}; if its unit changes there, give all in one")),
        tells_label(all).map(|channel| {
            format!(
                "`{channel}` alone tells the label of a series; if it is not known before, leave it out with --channels"
            )
        }),
    ];
    let codes =
        codes(all).into_iter().map(|code| format!("{code}; if it says that a value is missing, leave it empty"));
    codes.chain(said.into_iter().flatten()).for_each(|said| note(format_args!("{name}: {said}")));
}

/// The one series without a label that is at all times the sum of the others: half of all.
fn sum_of_others(all: &[Series]) -> Option<&String> {
    if all.len() < 3 {
        return None;
    }
    let points = |one: &'_ Series| -> Vec<(u64, f64)> {
        let all = one.times.iter().map(|time| time.to_bits()).zip(one.channel(0));
        all.filter(|(_, value)| !value.is_nan() && one.label.is_none()).collect()
    };
    let mut sums: HashMap<u64, f64> = HashMap::new();
    all.iter().flat_map(points).for_each(|(time, value)| *sums.entry(time).or_default() += value);
    let is_half = |one: &&Series| {
        let points = points(one);
        // Numbers in a file are rounded.
        let fits = |(time, value): &(u64, f64)| (2.0 * value - sums[time]).abs() <= 1e-3 * sums[time].abs();
        points.len() > 2 && points.iter().all(fits) && points.iter().any(|(_, value)| *value != 0.0)
    };
    let mut found = all.iter().filter(is_half);
    found.next().filter(|_| found.next().is_none())?.id.as_ref()
}

/// Where all values of a channel from a point on are more than ten times as large as those before it, or as small.
fn jump(one: &Series) -> Option<String> {
    let of_channel = |channel: usize| {
        let known = one.times.iter().zip(one.channel(channel)).filter(|(_, value)| !value.is_nan());
        let (times, values): (Vec<f64>, Vec<f64>) = known.unzip();
        let mut sorted = values.clone();
        sorted.sort_by(f64::total_cmp);
        let ends = DIFFERENT..(values.len() + 1).checked_sub(DIFFERENT)?;
        let n = ends.into_iter().find(|n| sorted[0] > 0.0 && sorted[*n] > 10.0 * sorted[n - 1])?;
        let is_low = |value: &f64| *value < sorted[n];
        let (rises, falls) = (values[..n].iter().all(is_low), values[values.len() - n..].iter().all(is_low));
        let (low, high) =
            (format!("{} to {}", sorted[0], sorted[n - 1]), format!("{} to {}", sorted[n], sorted[values.len() - 1]));
        let (at, before, after) = if rises { (n, low, high) } else { (values.len() - n, high, low) };
        let name = one.names.get(channel).map_or("values", String::as_str);
        (rises || falls)
            .then(|| format!("`{name}` is from {before} before {}, and from {after} from then on", one.time(times[at])))
    };
    (0..one.width).find_map(of_channel)
}

/// A channel that has one value in all points of series with one label, and another for each other label.
fn tells_label(all: &[Series]) -> Option<&String> {
    let tells = |channel: &usize| {
        let (mut labels, mut values) = (HashMap::new(), HashMap::new());
        for one in all {
            let (label, value) = (one.label(), one.values[*channel]);
            let is_told = *labels.entry(label).or_insert(value) == value
                && *values.entry(value.to_bits()).or_insert(label) == label;
            if !is_told || one.channel(*channel).any(|other| other != value) {
                return false;
            }
        }
        labels.len() > 1 && labels.len() * 4 <= all.len()
    };
    let first = all.first()?;
    (0..first.width).find(tells).and_then(|channel| first.names.get(channel))
}

/// Numbers that may stand for missing values: the least or the greatest, further off than all others from one another, which come again or
/// are all nines, such as -999. How often each comes, and from where to where the others go.
pub fn far_ends(mut values: Vec<f64>) -> Vec<(usize, f64, [f64; 2])> {
    values.sort_by(f64::total_cmp);
    let far = |code: f64| {
        let mut others: Vec<f64> = values.iter().copied().filter(|value| *value != code).collect();
        let count = values.len() - others.len();
        others.dedup();
        let (low, high) = (*others.first()?, *others.last()?);
        let is_nines = code.abs() >= 99.0 && (code.abs() + 1.0).log10().fract() == 0.0;
        let is_code = is_nines || count > 1 && others.len() >= DIFFERENT;
        (is_code && low < high && (low - code).max(code - high) > high - low).then_some((count, code, [low, high]))
    };
    values.first().into_iter().chain(values.last()).filter_map(|code| far(*code)).collect()
}

/// Such numbers in words, and zeros at the end of a series that has no others.
fn codes(all: &[Series]) -> Vec<String> {
    let mut found = Vec::new();
    for channel in 0..all.first().map_or(0, |one| one.width) {
        let of = all[0].names.get(channel).map_or(String::new(), |name| format!(" of `{name}`"));
        let values = |one: &'_ Series| -> Vec<f64> { one.channel(channel).filter(|value| !value.is_nan()).collect() };
        let before = found.len();
        found.extend(far_ends(all.iter().flat_map(values).collect()).into_iter().map(|(count, code, [low, high])| {
            format!("{}{of}: {code}, the others from {low} to {high}", counted(count, "values"))
        }));
        let zeros_at_end = |one: &Series| {
            let values = values(one);
            let others = values.iter().rposition(|value| *value != 0.0)? + 1;
            // Those that are 0 or 1 alone are no measures.
            let are_all = !values[..others].contains(&0.0) && values[..others].iter().any(|value| *value != 1.0);
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
        let flag: String = (0..22).map(|n| format!("{n},{}\n", u8::from(n < 20))).collect();
        assert!(codes(&format!("time,x\n{flag}")).is_empty());
    }

    #[test]
    fn sums_units_and_leaks_are_found() {
        let all = |text: &str, labels| {
            let reading = Reading { labels, ..Reading::default() };
            parse(text.as_bytes(), "csv", "f", &reading).unwrap().series
        };
        let sum = |ids: &[(&str, usize, usize)]| {
            let row = |(id, slope, level): &(&str, usize, usize), n| format!("{id},{n},{}\n", slope * n + level);
            let rows: String = ids.iter().flat_map(|one| (0..9).map(move |n| row(one, n))).collect();
            sum_of_others(&all(&format!("id,time,x\n{rows}"), false)).cloned()
        };
        let [a, b, both, c] = [("a", 1, 1), ("b", 2, 5), ("both", 3, 6), ("c", 5, 30)];
        assert_eq!(sum(&[a, b, both]).as_deref(), Some("both"));
        assert_eq!((sum(&[a, b, c, both]), sum(&[a, ("b", 1, 1)])), (None, None));
        let steps = |factor: usize| -> String {
            (0..40).map(|n| format!("{n},{}\n", (7 + n % 5) * if n < 25 { factor } else { 1 })).collect()
        };
        let jump = |rows: &str| jump(&all(&format!("time,x\n{rows}"), false)[0]);
        assert_eq!(jump(&steps(1000)).unwrap(), "`x` is from 7000 to 11000 before 25, and from 7 to 11 from then on");
        assert_eq!((jump(&steps(5)), jump("0,1\n")), (None, None));
        let leak = |other: usize| {
            let row =
                |n: usize| format!("{},{},{n},{},{}\n", n / 2, n % 2, n / 2 % 2 * 5 + n / 2 / 7 * other, n / 2 % 2);
            let text: String = (0..16).map(row).collect();
            tells_label(&all(&format!("id,time,x,code,label\n{text}"), true)).cloned()
        };
        assert_eq!((leak(0).as_deref(), leak(1)), (Some("code"), None));
    }
}
