//! The random rows of positive random features, drawn once a process and kept.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// `count` rows of `width` numbers, each as long as a normal vector, every `width` of them from the first on orthogonal to
/// each other: the directions are those of Gram and Schmidt from normal vectors, the lengths are drawn apart
/// (Choromanski et al. 2021). The same for the same seed on every machine: the generator is ChaCha with 8 rounds, logarithm
/// and cosine are not the system's, and all else is exactly rounded.
pub(super) fn orthogonal(count: usize, width: usize, seed: u64) -> Vec<f64> {
    let mut generator = ChaCha8Rng::seed_from_u64(seed);
    // The upper 53 bits, in (0, 1).
    let mut uniform = || ((generator.next_u64() >> 11) as f64 + 0.5) / 9_007_199_254_740_992.0;
    // Box and Muller.
    let mut normal = || (-2.0 * libm::log(uniform())).sqrt() * libm::cos(std::f64::consts::TAU * uniform());
    let mut rows = vec![0.0; count * width];
    if width == 0 {
        return rows;
    }
    for n in 0..count {
        let (before, rest) = rows.split_at_mut(n * width);
        let block = &before[(n - n % width) * width..];
        let row = &mut rest[..width];
        row.fill_with(&mut normal);
        // Twice, for what rounding leaves.
        for other in block.chunks_exact(width).chain(block.chunks_exact(width)) {
            let along = dot(row, other) / dot(other, other);
            row.iter_mut().zip(other).for_each(|(x, y)| *x -= along * y);
        }
        let own = dot(row, row).sqrt();
        let length = (0..width).map(|_| normal()).map(|x| x * x).sum::<f64>().sqrt();
        row.iter_mut().for_each(|x| *x *= length / own);
    }
    rows
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

/// What [`kept`] keeps at most: a model has a handful of them, and redrawing by seed must not fill the memory.
const KEPT: usize = 16;

/// Something made of drawn rows, by what it is made from.
type Entry<K> = (K, Arc<dyn Any + Send + Sync>);

pub(super) type Store<K> = Mutex<Vec<Entry<K>>>;

/// What `make` gives for `key`, made once a process as long as few others are asked for in between: a layer makes a
/// mechanism for each of its calls, and to draw the rows would take longer than the call.
pub(super) fn kept<K: PartialEq, V: Any + Send + Sync>(store: &Store<K>, key: K, make: impl FnOnce() -> V) -> Arc<V> {
    // A panic elsewhere leaves the list as whole as it was.
    let mut list = store.lock().unwrap_or_else(PoisonError::into_inner);
    let found = list.iter().find(|(known, value)| *known == key && value.is::<V>()).map(|(_, value)| value.clone());
    if let Some(Ok(value)) = found.map(Arc::downcast) {
        return value;
    }
    let value = Arc::new(make());
    if list.len() >= KEPT {
        list.remove(0);
    }
    list.push((key, value.clone()));
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_orthogonal_lengths_are_normal_and_seeds_differ() {
        let (count, width) = (400, 8);
        let rows = orthogonal(count, width, 3);
        let row = |n: usize| &rows[n * width..][..width];
        for i in 0..count {
            for j in (0..i).filter(|j| j / width == i / width) {
                assert!(dot(row(i), row(j)).abs() < 1e-12, "rows {i} and {j}");
            }
        }
        // |w|² has mean 8 and standard deviation 4, so the mean of 400 is within 4 · 0.2.
        let mean = rows.iter().map(|x| x * x).sum::<f64>() / count as f64;
        assert!((mean - width as f64).abs() < 0.8, "{mean}");
        assert_ne!(rows[..width], orthogonal(1, width, 4)[..]);
        assert_eq!(rows[..width], orthogonal(1, width, 3)[..]);
    }

    #[test]
    fn the_draw_is_the_same_on_every_machine() {
        let rows = orthogonal(3, 2, 7);
        assert_eq!(
            rows.iter().map(|x| x.to_bits()).collect::<Vec<u64>>(),
            [
                4609163465059306327,
                13819219870366494304,
                13818467225904160571,
                13831804847829127794,
                4612661392208638093,
                4603061276507037461
            ]
        );
    }

    #[test]
    fn what_was_drawn_is_kept_while_few_others_are_asked_for() {
        let store = Mutex::new(Vec::new());
        let first = kept(&store, 0, || 1.0f32);
        assert!(Arc::ptr_eq(&first, &kept(&store, 0, || 2.0f32)));
        assert_eq!(*kept(&store, 0, || 2.0f64), 2.0);
        for key in 1..=KEPT {
            kept(&store, key, || 0.0f32);
        }
        assert_eq!(*kept(&store, 0, || 3.0f32), 3.0);
    }
}
