// The first requests leave before the rest of the page is read.
import './first';
import './style.css';

void import('./app').then(({ show }) => show(document.getElementById('app')!));
