//! Prefill time over a number of things, as SVG.

use plotters::prelude::*;

/// What was measured with so many things in the prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    pub things: usize,
    pub cold_ms: f64,
    pub cached_ms: f64,
    pub disk_ms: Option<f64>,
}

/// Three lines over the number of `things`, the time on a logarithmic axis. `Err`: there are fewer than two points.
pub fn chart(title: &str, things: &str, points: &[Point]) -> Result<String, String> {
    if points.len() < 2 {
        return Err("a chart needs at least two points".into());
    }
    let mut svg = String::new();
    draw(title, things, points, &mut svg).map_err(|error| format!("the chart cannot be drawn: {error}"))?;
    Ok(svg)
}

/// Name, colour, (things, milliseconds).
type Line = (&'static str, RGBColor, Vec<(f64, f64)>);

fn draw(title: &str, things: &str, points: &[Point], svg: &mut String) -> Result<(), Box<dyn std::error::Error>> {
    let lines: [Line; 3] = [
        ("cold", RGBColor(0xc0, 0x39, 0x2b), points.iter().map(|p| (p.things as f64, p.cold_ms)).collect()),
        (
            "from disk",
            RGBColor(0x29, 0x80, 0xb9),
            points.iter().filter_map(|p| Some((p.things as f64, p.disk_ms?))).collect(),
        ),
        ("in memory", RGBColor(0x27, 0xae, 0x60), points.iter().map(|p| (p.things as f64, p.cached_ms)).collect()),
    ];
    let times = || lines.iter().flat_map(|(_, _, line)| line.iter().map(|&(_, ms)| ms.max(0.1)));
    let (least, most) = (times().fold(f64::INFINITY, f64::min), times().fold(1.0, f64::max));
    let last = points.iter().map(|p| p.things).max().unwrap_or(1).max(1) as f64;

    let area = SVGBackend::with_string(svg, (820, 480)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 20))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(76)
        .build_cartesian_2d(0.0..last * 1.05, (least / 2.0..most * 2.0).log_scale())?;
    chart
        .configure_mesh()
        .x_desc(things)
        .y_desc("prefill, ms")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y:.0}"))
        .draw()?;
    for (name, colour, line) in lines.into_iter().filter(|(_, _, line)| !line.is_empty()) {
        let line = line.into_iter().map(|(x, ms)| (x, ms.max(0.1)));
        chart
            .draw_series(LineSeries::new(line, colour.stroke_width(2)).point_size(3))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.9))
        .border_style(BLACK.mix(0.4))
        .draw()?;
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chart_has_its_lines_and_its_words() {
        let point = |things: usize, cold_ms: f64| Point { things, cold_ms, cached_ms: 40.0, disk_ms: Some(90.0) };
        let svg = chart("tools, thời gian", "tools", &[point(0, 80.0), point(1, 400.0), point(50, 20_000.0)]).unwrap();
        for part in ["<svg", "thời gian", "cold", "in memory", "from disk", "prefill, ms", "</svg>"] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
        assert!(svg.matches("<polyline").count() >= 3, "{svg}");
        assert!(chart("x", "y", &[point(0, 1.0)]).is_err());
    }
}
