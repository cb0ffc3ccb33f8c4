//! Nested lists of operations on digits, `[MAX 2 9 [MIN 4 7 ] 0 ]`, as Long Range Arena draws them.

use std::ops::RangeInclusive;

use super::generate::below;
use crate::tasks::batches::Random;

/// Digits are their own tokens; the operations and the end of a list follow.
pub const TOKENS: usize = 15;
const FIRST_OPERATION: u32 = 10;
const END: u32 = 14;

/// One in so many places below the deepest is a list, the others are digits.
const LISTS: usize = 4;

/// So many draws in a row that do not fit say that none will.
const TRIES: usize = 10_000;

/// The smallest, the largest, the middle (of an even number of digits the mean of both, rounded down), the sum modulo 10.
fn value(operation: u32, digits: &mut [u32]) -> u32 {
    digits.sort_unstable();
    let (count, middle) = (digits.len(), digits.len() / 2);
    match operation - FIRST_OPERATION {
        0 => digits[0],
        1 => digits[count - 1],
        2 if count.is_multiple_of(2) => (digits[middle - 1] + digits[middle]) / 2,
        2 => digits[middle],
        _ => digits.iter().sum::<u32>() % 10,
    }
}

/// Whether a list of such a length turns up at all.
pub fn can_be(length: RangeInclusive<usize>, depth: usize, arguments: usize) -> bool {
    let mut random = Random::new(0, 0);
    (0..TRIES).any(|_| list(&mut random, &length, depth, arguments).is_some())
}

/// A list of a length in this range, its tokens and its value. It must be known that there [can be](can_be) one.
pub fn draw(random: &mut Random, length: RangeInclusive<usize>, depth: usize, arguments: usize) -> (Vec<u32>, u32) {
    loop {
        if let Some(found) = list(random, &length, depth, arguments) {
            return found;
        }
    }
}

/// One try: a list at most `depth` deep, each with 2 to `arguments` members.
fn list(
    random: &mut Random,
    length: &RangeInclusive<usize>,
    depth: usize,
    arguments: usize,
) -> Option<(Vec<u32>, u32)> {
    let mut tokens = Vec::new();
    // The lists that are open: operation, members to come, digits so far.
    let mut open: Vec<(u32, usize, Vec<u32>)> = Vec::new();
    loop {
        // The whole is a list; its members stand at depth 2.
        let deep = open.len() + 1 >= depth;
        if open.is_empty() || !deep && below(random, LISTS) == 0 {
            let operation = FIRST_OPERATION + below(random, 4);
            tokens.push(operation);
            open.push((operation, 2 + below(random, arguments - 1) as usize, Vec::new()));
        } else {
            let digit = below(random, 10);
            tokens.push(digit);
            let (_, to_come, digits) = open.last_mut()?;
            digits.push(digit);
            *to_come -= 1;
        }
        while let Some((_, 0, _)) = open.last() {
            let (operation, _, mut digits) = open.pop()?;
            tokens.push(END);
            let digit = value(operation, &mut digits);
            let Some((_, to_come, digits)) = open.last_mut() else {
                return length.contains(&tokens.len()).then_some((tokens, digit));
            };
            digits.push(digit);
            *to_come -= 1;
        }
        if tokens.len() > *length.end() {
            return None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of the list that begins at `at`, and the place after it.
    fn read(tokens: &[u32], at: usize, depth: usize) -> (u32, usize, usize) {
        if tokens[at] < FIRST_OPERATION {
            return (tokens[at], at + 1, depth - 1);
        }
        let (operation, mut next, mut digits, mut deepest) = (tokens[at], at + 1, Vec::new(), depth);
        while tokens[next] != END {
            let (digit, after, deep) = read(tokens, next, depth + 1);
            digits.push(digit);
            (next, deepest) = (after, deepest.max(deep));
        }
        assert!((2..=10).contains(&digits.len()));
        let sum: u32 = digits.iter().sum();
        digits.sort_unstable();
        let half = digits.len() / 2;
        let found = match operation {
            10 => digits[0],
            11 => *digits.last().unwrap(),
            12 => (digits[half] + digits[(digits.len() - 1) / 2]) / 2,
            _ => sum % 10,
        };
        (found, next + 1, deepest)
    }

    #[test]
    fn a_list_has_the_value_that_is_asked() {
        let mut random = Random::new(1, 1);
        let mut seen = [0; 10];
        for n in 0..200 {
            let range = if n % 2 == 0 { 500..=2000 } else { 5..=40 };
            let (tokens, digit) = draw(&mut random, range.clone(), 10, 10);
            let (right, end, deepest) = read(&tokens, 0, 1);
            assert!(range.contains(&tokens.len()) && end == tokens.len() && deepest <= 10);
            assert_eq!(right, digit);
            seen[digit as usize] += 1;
        }
        assert!(seen.iter().all(|&count| count > 0), "{seen:?}");
    }

    #[test]
    fn values_are_those_of_their_operations() {
        for (operation, digits, right) in [
            (10, vec![4, 2, 9], 2),
            (11, vec![4, 2, 9], 9),
            (12, vec![9, 4, 2], 4),
            (12, vec![9, 5, 2, 4], 4),
            (13, vec![9, 5, 2], 6),
        ] {
            assert_eq!(value(operation, &mut digits.clone()), right, "{operation} of {digits:?}");
        }
    }

    #[test]
    fn lists_that_cannot_be_are_known() {
        assert!(can_be(500..=2000, 10, 10) && can_be(4..=20, 2, 3));
        assert!(!can_be(500..=2000, 10, 2) && !can_be(100..=200, 2, 10));
    }
}
