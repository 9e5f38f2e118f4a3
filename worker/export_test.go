package worker

// ReportLimit is for tests from outside.
var ReportLimit = reportLimit
