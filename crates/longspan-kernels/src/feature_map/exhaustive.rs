//! Elementwise maps and their slopes over the numbers of single precision, all of them where that is asked for:
//! `cargo test --release -p longspan-kernels --lib exhaustive -- --ignored --nocapture`, some minutes.

use std::sync::atomic::{AtomicU32, Ordering};

use super::FeatureMap;
use super::elementwise::{PullBackFeatures, load_features};
use crate::simd::dispatch;
use crate::simd::rows::{Rows, padded};

/// Numbers that are formed at a time.
const BLOCK: u32 = 1 << 12;

/// The largest error in units in the last place of the right value, and where it is.
#[derive(Debug, Clone, Copy, Default)]
struct Worst {
    ulp: f64,
    x: f32,
}

/// The distance of neighbouring numbers around `x`, a normal number.
fn unit(x: f64) -> f64 {
    2f64.powi(x.abs().log2().floor() as i32 - 23)
}

/// `exact` is the function in `f64` of what `fast` does to many numbers; of every `step`th number, up to `most`.
fn sweep(step: u32, most: f32, exact: impl Fn(f64) -> f64 + Sync, fast: impl Fn(&[f32], &mut [f32]) + Sync) -> Worst {
    let next = AtomicU32::new(0);
    let blocks = u32::MAX / step / BLOCK + 1;
    let work = || {
        let (mut worst, mut to) = (Worst::default(), vec![0.0; padded::<f32>(BLOCK as usize)]);
        loop {
            let block = next.fetch_add(1, Ordering::Relaxed);
            if block >= blocks {
                return worst;
            }
            let bits = (0..BLOCK).filter_map(|n| (block * BLOCK + n).checked_mul(step));
            let from: Vec<f32> = bits.map(f32::from_bits).filter(|x| x.is_finite() && *x <= most).collect();
            fast(&from, &mut to);
            for (&x, &got) in from.iter().zip(&to) {
                let right = exact(f64::from(x));
                let error = (f64::from(got) - right).abs();
                if right.abs() < f64::from(f32::MIN_POSITIVE) {
                    // What has no full precision may be 0.
                    assert!(error <= f64::from(f32::MIN_POSITIVE), "{x:e}: {got:e} instead of {right:e}");
                } else if right.abs() > f64::from(f32::MAX) {
                    assert!(got.is_infinite() || error <= unit(f64::from(f32::MAX)), "{x:e}: {got:e}");
                } else {
                    let ulp = error / unit(right);
                    if ulp.is_nan() || ulp > worst.ulp {
                        worst = Worst { ulp, x };
                    }
                }
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let all = running.into_iter().map(|one| one.join().expect("a sweep"));
        all.reduce(|a, b| if a.ulp.is_nan() || a.ulp >= b.ulp { a } else { b }).unwrap_or_default()
    })
}

fn features(map: FeatureMap, x: &[f32], to: &mut [f32]) {
    let width = padded::<f32>(x.len()).min(to.len());
    load_features((map, 0.0), Rows { data: x, stride: x.len() }, (1, x.len()), None, (&mut to[..width], width));
}

fn slopes(map: FeatureMap, x: &[f32], to: &mut [f32]) {
    let mut phi = vec![0.0; to.len()];
    features(map, x, &mut phi);
    to.fill(1.0);
    let (rows, row_length) = (Rows { data: x, stride: x.len() }, to.len());
    dispatch(PullBackFeatures { map, x: rows, phi: &phi, d: to, count: 1, width: x.len(), row_length });
}

/// `φ'`.
fn slope(map: FeatureMap, x: f64) -> f64 {
    match map {
        FeatureMap::Softplus => 1.0 / (1.0 + (-x).exp()),
        FeatureMap::Exp => x.exp(),
        _ if x > 0.0 => 1.0,
        FeatureMap::EluPlusOne => x.exp(),
        _ => 0.0,
    }
}

/// Every `step`th number; what the feature maps' `README.md` says of their errors.
fn all(step: u32) {
    // A larger exponent is never formed: the largest of a row is subtracted.
    let maps = [
        (FeatureMap::EluPlusOne, f32::MAX, [1.5, 1.5]),
        (FeatureMap::Relu, f32::MAX, [0.0, 0.0]),
        (FeatureMap::Softplus, f32::MAX, [4.5, 3.5]),
        (FeatureMap::Exp, 0.0, [1.5, 1.5]),
    ];
    for (map, most, allowed) in maps {
        let value = sweep(step, most, |x| map.apply(x), |x, to| features(map, x, to));
        let sloped = sweep(step, most, |x| slope(map, x), |x, to| slopes(map, x, to));
        println!(
            "{map}: {:.2} units in the last place at {:e}; slope {:.2} at {:e}",
            value.ulp, value.x, sloped.ulp, sloped.x
        );
        assert!(value.ulp <= allowed[0] && sloped.ulp <= allowed[1], "{map}: {value:?}, slope {sloped:?}");
    }
}

#[test]
fn some_numbers() {
    all(65_521);
}

#[test]
#[ignore = "all numbers take some minutes"]
fn all_numbers() {
    all(1);
}
