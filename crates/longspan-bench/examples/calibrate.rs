//! Scratch.
use longspan_bench::calibration::*;
use longspan_bench::registry::calibrated;
use longspan_kernels::*;
fn main() {
    let secs: f64 = std::env::args().nth(1).map_or(60.0, |s| s.parse().unwrap());
    let names: Vec<String> = std::env::args().skip(2).collect();
    let entries: Vec<_> =
        calibrated().into_iter().filter(|e| names.is_empty() || names.iter().any(|n| n == e.name)).collect();
    let settings = Settings { seconds: secs, ..Settings::default() };
    let t = std::time::Instant::now();
    let mut phase = None;
    let points = longspan_bench::on_threads(1, || {
        measure(&entries, &settings, &mut |p| {
            if phase.is_none() && !p.label.starts_with("checking") {
                phase = Some(t.elapsed());
            }
            std::ops::ControlFlow::Continue(())
        })
    })
    .unwrap()
    .unwrap()
    .unwrap();
    eprintln!("checks {:?} all {:?}", phase, t.elapsed());
    for p in &points {
        print!("{} {} {}x{}x{}:", p.mechanism, p.order.name(), p.dims.heads, p.dims.queries, p.dims.head_dim);
        for s in &p.samples {
            print!(" {} {:.2}/{:.2}", s.algorithm, s.forward * 1e6, s.both * 1e6);
        }
        println!();
    }
    let before = Rates::default();
    let t = std::time::Instant::now();
    let after = fit(&points, &before);
    eprintln!("fit {:?}", t.elapsed());
    for p in &points {
        print!("@ {} {} {}x{}x{}:", p.mechanism, p.order.name(), p.dims.heads, p.dims.queries, p.dims.head_dim);
        for s in &p.samples {
            print!(" {} {:.2}", s.algorithm, s.work.seconds(&after) / s.forward);
        }
        println!();
    }
    println!("{}", to_text(&judge(&points, &before), &judge(&points, &after)));
    for (r, s) in after.iter() {
        println!("{:40} {:12.3} ps  built-in {:12.3}", r.name(), s * 1e12, r.built_in() * 1e12);
    }
}
